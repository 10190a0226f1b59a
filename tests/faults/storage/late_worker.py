"""A process of `test_half_uploaded.py`, of two: the second one alone does not write, can't write, can't read.

python late_worker.py ADDRESS PROCESSES INDEX FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import numpy as np
from launching import join_job

from panax.checkpoint import CheckpointConfig, Checkpointer, MemoryConfig, MemoryTier, checkpointer, memory, restore
from panax.core import DamagedError, PanaxError, StoreError
from panax.job.agreement import broadcast_text


def state(step: int) -> dict[str, jax.Array]:
    mesh = jax.make_mesh((2,), ("fsdp",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    values = np.arange(64.0, dtype=np.float32) + step
    return {"w": jax.make_array_from_callback(values.shape, sharding, values.__getitem__)}


def refused(*_: Any) -> None:
    raise StoreError("the disk of process 1 is full")


def main() -> None:
    [folder] = join_job()
    second = jax.process_index() == 1
    said: list[str] = []
    saves = Checkpointer(folder, CheckpointConfig(commit_seconds=2.0, retries=0, keep_last=9), say=said.append)

    def save(step: int, **instead: Any) -> None:
        real = {name: getattr(checkpointer, name) for name in instead}
        for name in instead if second else ():
            setattr(checkpointer, name, instead[name])
        saves.save(state(step), step, {"data": step})
        saves.wait()
        for name in real:
            setattr(checkpointer, name, real[name])

    save(1)
    save(2, publish_part=lambda *_: None)
    save(3)
    save(4, publish_part=refused)
    save(4)
    save(5)
    saves.finish()
    broadcast_text("")  # The first process has committed.
    alone = [check(folder, second, said) for check in (passed_over, behind, unread, other, remembered)]
    print(json.dumps({"said": said, "alone": alone}), flush=True)


def passed_over(folder: str, second: bool, said: list[str]) -> int:
    """The step that is found where the second process alone can't use the newest one."""
    saves = Checkpointer(folder, say=said.append)
    if second:
        saves._saved.manifests[5] = DamagedError("flipped")
    return next(saves.newest_first()).manifest.step


def behind(folder: str, second: bool, said: list[str]) -> int:
    """The step that is found where the second process does not see the newest one in its list."""
    saves = Checkpointer(folder, say=said.append)
    if second:
        del saves._saved.manifests[5]
    return next(saves.newest_first()).manifest.step


def unread(folder: str, second: bool, said: list[str]) -> str:
    """The error if the second process alone can't read the store."""
    saves = Checkpointer(folder, say=said.append)
    if second:
        saves.store.folders = refused  # type: ignore[method-assign]
    try:
        return str(next(saves.newest_first()).manifest.step)
    except PanaxError as error:
        return str(error)


def other(folder: str, second: bool, said: list[str]) -> str:
    """The error if the processes would restore different checkpoints."""
    like = state(0)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    checkpoint = Checkpointer(folder, say=said.append).open(4 if second else 5)
    try:
        return str(restore(checkpoint, abstract, jax.tree.map(lambda x: x.sharding, like)))
    except PanaxError as error:
        return str(error)


def remembered(folder: str, second: bool, said: list[str]) -> int | None:
    """The step that is found in the memory of hosts where the second process could not write its copy of the newest one."""
    tier = MemoryTier(MemoryConfig(every=5, directory=f"{folder}-of-{jax.process_index()}"), "run", said.append)
    for step in (5, 10):
        tier.save(state(step), step, {"data": step})
    tier._wait_for_previous()
    if second:
        memory.publish_part = refused
    tier.save(state(15), 15, {"data": 15})
    tier._wait_for_previous()
    newest = tier.newest()
    tier.close(forget=True)
    return None if newest is None else newest.manifest.step


if __name__ == "__main__":
    main()
