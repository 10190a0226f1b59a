"""Rollouts in a job of two processes: all draw, the first one asks for replies and rewards, and a resumed job is the same."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import rollouts_worker
from launching import run_job

from panax.rollouts.journal import JOURNAL_FILE

sys.path.insert(0, str(Path(__file__).parent.parent / "run" / "rollouts"))

from judges import train_reward_model, train_teacher
from letters import write_files

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("turns", "asynchronous", "judged"),
    [(1, False, False), (3, False, False), (1, False, True), (1, True, True)],
    ids=["functions", "turns", "models", "asynchronous"],
)
def test_two_processes_learn_from_the_same_rewards_and_resume_exactly(
    tmp_path, monkeypatch, turns, asynchronous, judged
):
    write_files(tmp_path)
    monkeypatch.setenv("LETTERS_MARK", str(tmp_path / "mark"))
    folder = tmp_path / "run"
    judges = [train_teacher(tmp_path), train_reward_model(tmp_path)] if judged else []

    def run():
        arguments = [str(folder), str(tmp_path / "cache"), str(turns), str(asynchronous), *judges]
        first, last = run_job(tmp_path / "job", rollouts_worker.__file__, arguments, processes=2, devices=2)
        assert first["weights"] == last["weights"] and first["step"] == last["step"] == 4
        assert first["evaluation"]["loss"] == last["evaluation"]["loss"]
        return first

    undisturbed = run()
    lines = [json.loads(line) for line in (folder / JOURNAL_FILE).read_text().splitlines()]
    assert [line["rollout"] for line in lines if "turn" not in line] == [1, 2, 3, 4]
    replies = [line for line in lines if "turn" in line]
    assert {line["turn"] for line in replies} == ({1, 2, 3} if turns == 3 else set())
    recorded = sum(len(line["replies"]) for line in replies)
    asked = len((tmp_path / "mark").read_text()) if turns == 3 else 0
    # Those of the evaluation are not in the journal.
    assert recorded <= asked
    # Random numbers: what was not read from the journal would be others.
    for step in (3, 4):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
    shutil.rmtree(tmp_path / "job")
    resumed = run()
    assert resumed["weights"] == undisturbed["weights"]
    assert not any("different now" in line for line in resumed["said"])
    assert len((folder / JOURNAL_FILE).read_text().splitlines()) == len(lines)
    if turns == 3:
        # The evaluation alone asked again: for its few prompts, where two rollouts have half of the replies.
        assert len((tmp_path / "mark").read_text()) - asked < recorded // 8
