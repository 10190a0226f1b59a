"""Each single fault of an object store while a checkpoint is saved or restored, and what came of it.

The tests run it, and print the table in docs/reliability/storage-faults.md by it: python tests/faults/storage/store_faults.py
"""

import dataclasses
import itertools
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from servers import Fault, FaultProxy, S3Server
from servers.s3 import client_environment

from panax.checkpoint import CheckpointConfig, Checkpointer, restore
from panax.core import DamagedError, PanaxError
from panax.stores.objects import ObjectStore
from panax.stores.retry import RetryPolicy

POLICY = RetryPolicy(
    attempts=4, stagger_seconds=0.0, base_seconds=0.01, cap_seconds=0.05, missing_seconds=0.02, request_seconds=1.0,
    deadline_seconds=30.0, slowest_bytes_per_second=1e9,
)  # fmt: skip
CONFIG = CheckpointConfig(retries=1, retry_seconds=0.02, keep_last=2, keep_best=0)

PLACES = {
    ("save", "data"): ("PUT", r"step_00000003/.*\.bin"),
    ("save", "manifest"): ("PUT", r"step_00000003/manifest\.json"),
    ("save", "list"): ("GET", r"list-type=2"),
    ("save", "removal"): ("POST", r"\?delete"),
    ("restore", "data"): ("GET", r"step_00000002/.*\.bin"),
    ("restore", "manifest"): ("GET", r"step_00000002/manifest\.json"),
    ("restore", "list"): ("GET", r"list-type=2"),
}
PASSING = ("500", "503", "429", "reset", "lost", "slow", "cut", "404", "flip_write", "flip_read")
STAYING = ("503", "403", "reset", "lost", "slow", "cut", "404", "flip_write", "flip_read")


@dataclasses.dataclass(frozen=True)
class Case:
    """A fault, once or for good (`stays`), while something is done, in the requests for one kind of object."""

    kind: str
    stays: bool
    during: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind}-{'stays' if self.stays else 'once'}-{self.during}-{self.place}"

    @property
    def fault(self) -> Fault:
        method, path = PLACES[self.during, self.place]
        return Fault(kind=self.kind, method=method, path=path, times=None if self.stays else 1, seconds=1.5)


def cases() -> list[Case]:
    """All that can happen: a bit can flip only in a body."""
    found = []
    for (during, place), (method, _) in PLACES.items():
        for stays, kinds in ((False, PASSING), (True, STAYING)):
            without = "flip_read" if method == "PUT" else "flip_write"
            found += [Case(kind, stays, during, place) for kind in kinds if kind != without]
    return found


def state(seed: int) -> dict[str, jax.Array]:
    """A small state over two devices, the second array on both."""
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    shards, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)) for spec in (("fsdp",), ()))
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "w": jax.device_put(jax.random.normal(keys[0], (64, 32)), shards),
        "b": jax.device_put(jax.random.normal(keys[1], (33,)).astype(jnp.bfloat16), whole),
    }


def same(found: dict[str, jax.Array], step: int) -> bool:
    """Whether a state is bitwise the one of a step."""
    expected = state(step)
    return all(np.asarray(found[n]).tobytes() == np.asarray(expected[n]).tobytes() for n in expected)


def restored(checkpoint) -> dict[str, jax.Array]:
    like = state(0)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    return restore(checkpoint, abstract, jax.tree.map(lambda x: x.sharding, like))


def go_on(checkpointer: Checkpointer) -> tuple[int, dict[str, jax.Array]]:
    """The newest state that is whole, as a run finds it, and its step; 0 if there is none."""
    for checkpoint in checkpointer.newest_first():
        try:
            return checkpoint.manifest.step, restored(checkpoint)
        except DamagedError as error:
            checkpointer.mark_damaged(checkpoint.manifest.step, error)
    return 0, {}


def save(checkpointer: Checkpointer, step: int) -> PanaxError | None:
    """Save the state of a step; return its error, if any."""
    checkpointer.save(state(step), step, {"data": {"at": step}})
    try:
        checkpointer.finish()
    except PanaxError as error:
        return error
    return None


def assert_whole(store: ObjectStore) -> list[int]:
    """The steps that are committed, each of which is bitwise right."""
    said: list[str] = []
    checkpointer = Checkpointer(store, CONFIG, say=said.append)
    for checkpoint in checkpointer.newest_first():
        assert checkpoint.verify() == [] and same(restored(checkpoint), checkpoint.manifest.step), checkpoint.url
        assert checkpoint.manifest.host == {"data": {"at": checkpoint.manifest.step}}
    assert not said and not checkpointer.damaged_steps, said
    return checkpointer.steps()


def run(case: Case, server: FaultProxy, bucket: str) -> str:
    """Meet a fault on a new bucket; what came of it, in words. Asserts that nothing is lost or wrong."""
    said: list[str] = []
    store = ObjectStore.open(f"{bucket}/run", POLICY)
    checkpointer = Checkpointer(store, CONFIG, say=said.append)
    for step in (1, 2):
        assert save(checkpointer, step) is None and not said, said
    act = _while_saving if case.during == "save" else _while_restoring
    outcome = act(case, server, store, checkpointer, said)
    met = server.faults.counts.faults.get(case.kind, 0)
    assert met >= 1, "the fault was not met"
    server.faults.set()
    assert_whole(store)
    later = Checkpointer(store, CONFIG, say=said.append)
    later.sweep()
    assert save(later, 4) is None
    assert assert_whole(store)[-1] == 4 and len(later.steps()) == 2
    return outcome


def _while_saving(
    case: Case, server: FaultProxy, store: ObjectStore, checkpointer: Checkpointer, said: list[str]
) -> str:
    server.faults.set(case.fault)
    error = save(checkpointer, 3)
    server.faults.set()
    steps = assert_whole(store)
    assert 2 in steps, "the newest before was lost"
    if error is None:
        assert 3 in steps
        if not said:
            return "committed"
        assert any("removed" in line or "retried" in line for line in said), said
        return "committed, saying so" if steps == [2, 3] else "committed; an old one not removed, saying so"
    assert steps[:2] == [1, 2], "one was removed for what then failed"
    assert any(line.startswith("warning: saving step 3") for line in said), said
    assert "the checkpoint of step 2 is undamaged" in str(error), error
    if 3 in steps:
        assert any("may still be committed" in line for line in said), said
        return "said to have failed; it is there and whole"
    return "failed, saying so; the ones before are whole"


def _while_restoring(
    case: Case, server: FaultProxy, store: ObjectStore, checkpointer: Checkpointer, said: list[str]
) -> str:
    server.faults.set(case.fault)
    try:
        step, result = go_on(Checkpointer(store, CONFIG, say=said.append))
    except PanaxError as error:
        assert case.stays and not isinstance(error, DamagedError) and "can't be" in str(error), error
        return "an error that says so; nothing is read from an older one"
    assert same(result, step), f"step {step} was restored wrongly"
    if step == 2:
        assert not said, said
        return "read"
    assert step == 1 and said and "the checkpoint of step 2 is not used" in said[0], (step, said)
    assert case.stays, (case, said)
    return "the one before is used, saying so"


def main() -> None:
    numbers = itertools.count()
    outcomes: dict[tuple[str, str, bool, str], list[str]] = {}
    begun = time.monotonic()
    with S3Server() as s3:
        for case in cases():
            if len(sys.argv) > 1 and sys.argv[1] not in str(case):
                continue
            with FaultProxy(s3.url) as server:
                os.environ.update(client_environment(server.url))
                outcome = run(case, server, s3.make_bucket(f"table{next(numbers)}"))
            outcomes.setdefault((case.during, case.place, case.stays, outcome), []).append(case.kind)
            print(f"{case}: {outcome}", file=sys.stderr, flush=True)
    print("| during | of | the fault comes | kinds | outcome |\n|---|---|---|---|---|")
    for (during, place, stays, outcome), kinds in outcomes.items():
        print(f"| {during} | {place} | {'and stays' if stays else 'once'} | {', '.join(kinds)} | {outcome} |")
    print(f"\n{len(cases())} cases in {time.monotonic() - begun:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
