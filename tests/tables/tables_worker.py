"""A process of `test_tables_of_many.py`: restores tables from a folder, if there is one, trains them on a mesh, and saves.

python tables_worker.py ADDRESS PROCESSES INDEX MESH STEPS FROM TO
"""

import hashlib
import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from launching import join_job
from recommending import BATCH_AXES, TinyRecommender, batch_of

from panax.checkpoint import CheckpointConfig, Checkpointer, restore
from panax.mesh import MeshShape, Placement
from panax.optim import RowWiseAdagrad, Schedule, Sgd
from panax.train import CompiledStep, Program


def main() -> None:
    mesh, steps, source, folder = join_job()
    print(json.dumps(trained(json.loads(mesh), int(steps), source, folder)), flush=True)


def step_on(mesh: dict[str, int], devices: Any = None) -> CompiledStep:
    optimizer = RowWiseAdagrad(schedule=Schedule(peak=0.1, decay="constant"))
    program = Program.create(
        TinyRecommender(), Sgd(schedule=Schedule(peak=0.1)), num_steps=10, embedding_optimizer=optimizer
    )
    return CompiledStep(program, Placement.create(MeshShape(**{"fsdp": 1, **mesh}), devices=devices), BATCH_AXES)


def trained(mesh: dict[str, int], steps: int, source: str, folder: str, devices: Any = None) -> dict[str, Any]:
    """Losses, and digests of the whole state before and after."""
    step = step_on(mesh, devices)
    state = step.init(0)
    if source != "-":
        checkpoint = next(Checkpointer(source).newest_first())
        state = restore(checkpoint, step.program.abstract, step.shardings)
    begun, losses = digest(state), []
    for number in range(int(state.step), int(state.step) + steps):
        state, scalars = step(state, step.put(batch_of(number)))
        losses.append(float(scalars["loss"]))
    if folder != "-":
        checkpointer = Checkpointer(folder, CheckpointConfig(commit_seconds=30.0))
        checkpointer.sweep()
        checkpointer.save(state, int(state.step), {"data": None})
        checkpointer.finish()
    return {"losses": losses, "begun": begun, "ended": digest(state), "sum": float(total(state))}


def whole(leaf: jax.Array) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(leaf, tiled=True) if jax.process_count() > 1 else leaf)


def digest(state: Any) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves((state.params, state.tables, state.step)):
        found.update(whole(leaf).tobytes())
    return found.hexdigest()


def total(state: Any) -> float:
    return sum(float(np.abs(whole(leaf).astype(np.float64)).sum()) for leaf in jax.tree.leaves(state.params.tables))


if __name__ == "__main__":
    main()
