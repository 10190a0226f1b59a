"""A process of `test_rollback_faults.py`: a run over data with bad batches, which can be killed while it goes back.

python rollback_worker.py ADDRESS PROCESSES INDEX FOLDER SETTINGS

In SETTINGS, `kill` is (process, what, number): kill -9 of that process as it calls that function the so manieth time.
"""

import dataclasses
import hashlib
import json
import os
import signal

import jax
import numpy as np
from jax.experimental import multihost_utils
from launching import join_job
from rollback_run import experiment

from panax import fit
from panax.checkpoint import CheckpointConfig, Checkpointer, MemoryConfig, MemoryTier
from panax.checkpoint import checkpointer as checkpointer_module
from panax.core import named_leaves
from panax.hooks import Hook
from panax.mesh import MeshShape
from panax.run.recovery import rollback
from panax.run.reporting.report import RunReporter

PLACES = {
    "restore": (rollback, "restore_newest"),
    "record": (rollback, "write_rollbacks"),
    "forget": (Checkpointer, "remove_abandoned"),
    "remove": (checkpointer_module, "remove"),
    "memory": (MemoryTier, "forget"),
    "tell": (RunReporter, "record_rollback"),
}


class Reads(Hook):
    """Waits for the scalars of each step in the last process alone: it knows more than the others do."""

    def after_step(self, run):
        if jax.process_index() == jax.process_count() - 1:
            run.read()


def install(process: int, what: str, number: int) -> None:
    if jax.process_index() != process:
        return
    where, name = PLACES[what]
    original, calls = getattr(where, name), []

    def killed(*arguments, **more):
        calls.append(None)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **more)

    setattr(where, name, killed)


def digest(state) -> str:
    found = hashlib.sha256()
    for name, leaf in named_leaves(state).items():
        leaf = jax.random.key_data(leaf) if name == "key" else leaf
        whole = leaf if leaf.is_fully_addressable else multihost_utils.process_allgather(leaf, tiled=True)
        found.update(np.ascontiguousarray(whole).tobytes())
    return found.hexdigest()


def main() -> None:
    folder, settings = join_job()
    options = json.loads(settings)
    os.environ["PANAX_MEMORY"] = f"{folder}/host-{jax.process_index()}"
    if "kill" in options:
        install(*options.pop("kill"))
    memory = MemoryConfig(every=options.pop("memory", 0))
    run = experiment(
        f"{folder}/run", checkpoint=CheckpointConfig(every=5, memory=memory), hooks=(Reads(),), mesh=MeshShape(fsdp=-1),
        **options,
    )  # fmt: skip
    result = fit(dataclasses.replace(run), say=lambda line: print(line, flush=True))
    print(json.dumps({"step": result.step, "digest": digest(result.state)}), flush=True)


if __name__ == "__main__":
    main()
