"""A store with a wrong list: nothing is taken for an empty place, so no checkpoint is overwritten or passed over."""

import time

import jax.numpy as jnp
import pytest
from servers import WRONG_ANSWERS, Fault

from panax.checkpoint import CheckpointConfig, Checkpointer
from panax.core import CheckpointError, StoreError
from panax.stores.objects import ObjectStore
from panax.stores.retry import RetryPolicy

QUICK = RetryPolicy(stagger_seconds=0.0, base_seconds=0.01, cap_seconds=0.1, missing_seconds=0.02)
LISTS = "list-type="


def quiet(line):
    pass


def checkpointer(bucket: str) -> Checkpointer:
    return Checkpointer(ObjectStore.open(f"{bucket}/run", QUICK), CheckpointConfig(retries=0, keep_last=9), say=quiet)


def saved(bucket: str, *steps: int) -> Checkpointer:
    """A run's checkpoints, written by a job of its own."""
    job = checkpointer(bucket)
    job.acquire()
    for step in steps:
        job.save({"w": jnp.full(4, float(step))}, step, {"data": None})
        job.finish()
    return job


@pytest.mark.parametrize("kind", ["page", "error", "empty", "stale"])
def test_what_is_not_the_list_is_an_error_and_nothing_is_overwritten(s3_server, proxy, bucket, kind):
    saved(bucket, 1, 2)
    proxy.faults.set(Fault(kind=kind, path=LISTS, times=None))
    again = checkpointer(bucket)
    with pytest.raises((CheckpointError, StoreError), match="list"):
        again.acquire()
    with pytest.raises((CheckpointError, StoreError), match="list"):
        next(checkpointer(bucket).newest_first())
    proxy.faults.set()
    assert checkpointer(bucket).steps() == [1, 2]
    assert [each.manifest.step for each in checkpointer(bucket).newest_first()] == [2, 1]


def test_a_list_from_before_the_last_checkpoint_passes_it_over_no_more(s3_server, proxy, bucket):
    saved(bucket, 1)
    assert checkpointer(bucket).steps() == [1]  # the answers that are given again
    proxy.faults.set()
    job = checkpointer(bucket)
    job.acquire()
    job.save({"w": jnp.zeros(4)}, 2, {"data": None})
    job.finish()
    proxy._server.first_answers = {
        path: body.replace(b"step_00000002", b"stop_00000002") for path, body in fresh_lists(proxy, bucket).items()
    }
    proxy.faults.set(Fault(kind="stale", path=LISTS, times=None))
    said: list[str] = []
    again = Checkpointer(
        ObjectStore.open(f"{bucket}/run", QUICK), CheckpointConfig(retries=0, keep_last=9), say=said.append
    )
    assert again.steps() == [1, 2] and again.latest() == 2
    assert len(said) == 1 and "lacks" in said[0] and "step_00000002, which exists: it is stale" in said[0]
    checkpoint = next(again.newest_first())
    assert checkpoint.manifest.step == 2 and (checkpoint.read("w") == 0).all() and not checkpoint.verify()


def fresh_lists(proxy, bucket) -> dict[str, bytes]:
    proxy._server.first_answers = {}
    checkpointer(bucket).steps()
    return dict(proxy._server.first_answers)


def test_a_checkpoint_that_was_removed_is_not_missed(s3_server, proxy, bucket):
    saved(bucket, 1, 2)
    store = ObjectStore.open(f"{bucket}/run", QUICK)
    store.delete(entry.path for entry in store.list("step_00000002"))
    assert checkpointer(bucket).steps() == [1]


def test_pages_that_do_not_end_are_an_error(s3_server, proxy, bucket):
    store = ObjectStore.open(f"{bucket}/run", QUICK)
    store.write("a/x", [b"x"])
    assert "repeated" in WRONG_ANSWERS
    proxy.faults.set(Fault(kind="repeated", path=LISTS, times=None))
    started = time.monotonic()
    for listed in (store.list, store.folders):
        with pytest.raises(StoreError, match="its pages repeat themselves"):
            listed()
    assert time.monotonic() - started < 30


def test_a_list_has_a_deadline(monkeypatch):
    store = ObjectStore.open("memory://endless/run", RetryPolicy(list_seconds=0.2))
    numbers = iter(range(10**9))

    def pages(*_, **__):
        while True:
            time.sleep(0.01)
            yield [{"path": f"run/{next(numbers):012d}", "size": 1}]

    monkeypatch.setattr("panax.stores.objects.obstore.list", pages)
    for listed in (store.list, store.folders):
        with pytest.raises(StoreError, match=r"had not ended after [0-9,]+ objects .* within 0 s"):
            listed()


def test_a_job_that_was_taken_for_dead_saves_no_more(tmp_path):
    """Two jobs on one place: the second one has claimed it, and the first neither writes nor removes anything after that."""
    lines: list[str] = []
    first, second = (
        Checkpointer(tmp_path, CheckpointConfig(retries=0, keep_last=1), say=lines.append) for _ in range(2)
    )
    state = {"w": jnp.zeros(4)}
    first.acquire()
    first.save(state, 1, {"data": None})
    first.finish()
    second.acquire()
    second.save(state, 5, {"data": None})
    second.finish()
    first.save(state, 2, {"data": None})
    with pytest.raises(CheckpointError, match="another job has written checkpoints"):
        first.finish()
    assert Checkpointer(tmp_path).steps() == [5]


def test_a_damaged_record_is_reported_and_written_again(tmp_path):
    lines: list[str] = []
    first = Checkpointer(tmp_path, say=lines.append)
    first.acquire()
    first.save({"w": jnp.zeros(4)}, 1, {"data": None})
    first.finish()
    file = tmp_path / "run" / "run.json"
    file.write_bytes(file.read_bytes().replace(b'"newest": 1', b'"newest": 7'))
    again = Checkpointer(tmp_path, say=lines.append)
    again.acquire()
    assert again.steps() == [1] and any("is not the record of a run" in line for line in lines)
    assert len(again.run_name()) == 16
