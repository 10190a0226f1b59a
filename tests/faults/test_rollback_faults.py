"""Processes go back together; one that is killed while they do leaves a run that resumes as if undisturbed."""

import json
from pathlib import Path

import pytest
import rollback_worker
from launching import Job, run_job

from panax.checkpoint import Checkpointer

pytestmark = pytest.mark.slow

BAD = [8, 9, 10, 23, 24, 25, 26, 27]
LEFT_OUT = [8, 9, 10, *range(14, 28)]
"""A group of its own, and one that takes two ways back: the second of them to step 10, at batch 13."""


def ended(folder: Path, processes: int, **settings):
    arguments = [str(folder), json.dumps({"bad": BAD, "steps": 30, **settings})]
    found = run_job(folder / "job", rollback_worker.__file__, arguments, processes=processes, devices=2 // processes)
    assert len({each["digest"] for each in found}) == 1
    return found[0]


def rollbacks(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run/rollbacks.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=[1, 2])
def told(request, tmp_path_factory):
    """How many processes, and the end of a run with these batches skipped from its beginning."""
    folder = tmp_path_factory.mktemp("told")
    return request.param, ended(folder, request.param, skip_batches=LEFT_OUT, bad=BAD)


@pytest.mark.parametrize("memory", [0, 3])
def test_all_go_back_together(told, tmp_path, memory):
    processes, expected = told
    actual = ended(tmp_path, processes, memory=memory)
    back = rollbacks(tmp_path)
    if not memory:
        assert [each["to"] for each in back] == [5, 15, 10]
        assert sorted(number for each in back for number in each["batches"]) == LEFT_OUT
        assert actual == expected
    else:
        again = ended(tmp_path / "again", processes, skip_batches=[n for each in back for n in each["batches"]])
        assert actual == again and [each["to"] for each in back][:2] == [6, 18]


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("what", rollback_worker.PLACES)
def test_killed_while_going_back(told, tmp_path, what, number):
    processes, expected = told
    memory = 100 if what == "memory" else 0
    kill = [processes - 1 if what in ("restore", "forget", "memory", "tell") else 0, what, number]
    settings = {"bad": BAD, "steps": 30, "memory": memory, "kill": kill}
    job = Job(
        tmp_path / "killed", rollback_worker.__file__, [str(tmp_path), json.dumps(settings)], processes=processes,
        devices=2 // processes,
    )  # fmt: skip
    codes = job.wait(120)
    assert -9 in codes, job.shown()
    assert ended(tmp_path, processes, memory=memory) == expected
    checkpoints = Checkpointer(tmp_path / "run/checkpoints")
    assert checkpoints.steps() == [25, 30] and not checkpoints.damaged_steps
    assert sorted(number for each in rollbacks(tmp_path) for number in each["batches"]) == LEFT_OUT
