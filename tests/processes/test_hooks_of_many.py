"""Hooks in a job of two processes: what one of them asks for, or fails at, all meet at the same step."""

import json

import hooks_worker
import pytest
from launching import run_job

from panax.run.parts.hook_runner import REQUESTED_ELSEWHERE

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("what", ["stop", "raise"])
def test_one_process_asks_and_all_end_at_the_next_report(what, tmp_path):
    folder = tmp_path / "run"
    (tmp_path / "choices.jsonl").write_text('{"prompt": "def", "choices": [" f", " g"], "answer": 0}\n')
    (tmp_path / "texts.jsonl").write_text('{"text": "import os"}\n')
    arguments = [str(folder), str(tmp_path / "cache"), what]
    first, last = run_job(tmp_path / "job", hooks_worker.__file__, arguments, processes=2, devices=2)
    # Asked for after step 1, evaluated at the report of step 2; the stop evaluates too.
    assert [step for step, _ in first["evaluated"]] == ([2, 4] if what == "stop" else [2])
    assert first["evaluated"] == last["evaluated"]
    assert (folder / "checkpoints" / "step_00000004" / "manifest.json").exists()
    # The first process alone writes; every one took part.
    assert list(first["texts"]) == ["2", "4"] and not last["texts"]
    # Both have asked the questions, with the same scores.
    assert first["scores"] == last["scores"] and first["scores"][0] in (0.0, 1.0) and first["scores"][1] > 0.0
    if what == "stop":
        assert json.loads((folder / "questions.json").read_text())["step"] == 4
        assert first["step"] == last["step"] == 4
        assert (first["stopped"], last["stopped"]) == (REQUESTED_ELSEWHERE, "one process has enough")
    else:
        assert "hook Asks raised in after_step after step 3" in last["error"] and "ZeroDivisionError" in last["error"]
        assert "another process" in first["error"] and "step_00000004" in first["error"]
