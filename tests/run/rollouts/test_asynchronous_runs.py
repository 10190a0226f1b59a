"""Rollouts that are drawn before the update by the one before them: staleness, rewards in the background, exact resumption."""

import dataclasses
import json
import shutil
import threading

import numpy as np
import pytest
from letter_runs import Ends, run, same
from letters import letters

from panax.core.errors import DataError, HookError, RecipeError, TrainingError
from panax.models import PolicyGradient
from panax.rollouts.answers import Episode, ReplyTokens, SampledAnswer
from panax.rollouts.drawn_answers import DrawnAnswers
from panax.rollouts.journal import JOURNAL_FILE
from panax.rollouts.verdicts import BackgroundCall
from panax.run.reporting.history import read_history


def asynchronous(files, folder, reward="counts_calls", **settings):
    data = {"held_out": 0.0, "asynchronous": True, **settings.pop("data", {})}
    experiment = letters(files, reward, data=data, directory=str(folder), num_steps=6, **settings)
    return dataclasses.replace(experiment, checkpoint=dataclasses.replace(experiment.checkpoint, every=2))


def test_rollouts_are_one_update_old_and_resume_exactly(files, tmp_path):
    (files / "mark").unlink(missing_ok=True)
    undisturbed = run(asynchronous(files, tmp_path / "one"))
    calls = len((files / "mark").read_text())
    assert calls == 6 * 16
    rows = read_history(tmp_path / "one")
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1, 1, 1]
    # The first rollout is by the parameters that learn from it, the others are not.
    gaps = [row["train/gap/token"] for row in rows]
    assert gaps[0] < 1e-5 < min(gaps[1:])
    lines = [json.loads(line) for line in (tmp_path / "one" / JOURNAL_FILE).read_text().splitlines()]
    assert [(line["rollout"], line["step"]) for line in lines] == [(1, 0), (2, 0), (3, 1), (4, 2), (5, 3), (6, 4)]

    experiment = asynchronous(files, tmp_path / "two")
    with pytest.raises(HookError):
        run(dataclasses.replace(experiment, hooks=(Ends(3),)))
    said = []
    assert same(undisturbed, run(experiment, say=said.append))
    assert len((files / "mark").read_text()) == 2 * calls
    # From an older checkpoint: what was drawn for its next step is there.
    for step in (4, 6):
        shutil.rmtree(tmp_path / "two" / "checkpoints" / f"step_{step:08d}")
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step_00000003", ignore_errors=True)
    assert same(undisturbed, run(experiment, say=said.append))
    assert len((files / "mark").read_text()) == 2 * calls
    assert not any("different now" in line for line in said)


def test_several_updates_of_a_stale_rollout_weigh_what_drew_it(files, tmp_path):
    objective = PolicyGradient(several_updates=True, correction="token_truncate")
    settings = {"objective": objective, "data": {"epochs": 2}}
    undisturbed = run(asynchronous(files, tmp_path / "one", "share_of_letters", **settings))
    rows = read_history(tmp_path / "one")
    assert rows[0]["rollout/staleness"] == 0 and rows[2]["rollout/staleness"] == 2
    # Ratios are to the parameters before the rollout's first update, whatever drew it.
    assert [row["train/ratio"] == pytest.approx(1.0, abs=1e-6) for row in rows] == [True, False] * 3
    assert (
        rows[0]["train/correction"]
        == pytest.approx(1.0, abs=1e-5)
        != pytest.approx(rows[2]["train/correction"], abs=1e-5)
    )
    for step in (4, 6):
        shutil.rmtree(tmp_path / "one" / "checkpoints" / f"step_{step:08d}")
    assert same(undisturbed, run(asynchronous(files, tmp_path / "one", "share_of_letters", **settings)))


def test_failed_rewards_in_the_background_end_the_run(files, tmp_path):
    with pytest.raises(TrainingError, match="an answer has no reward"):
        run(asynchronous(files, tmp_path / "run", "fails_on_b"))
    with pytest.raises(RecipeError, match=r"remove it, or data\.asynchronous"):
        asynchronous(files, tmp_path, data={"refills": 1})


def test_drawn_answers_are_json_and_others_are_refused():
    answer = SampledAnswer(
        (1, 2), 3, (4, 5), (-0.1, np.float32(-0.7).item()), "text", True, None, (ReplyTokens(1, (7,)),),
        Episode(({"role": "user", "content": "a"},), {"tries": 1}, turns=2),
    )  # fmt: skip
    drawn = DrawnAnswers(5, 4, [answer, dataclasses.replace(answer, replies=(), episode=None)], [8, 9])
    assert DrawnAnswers.from_json(json.loads(json.dumps(drawn.to_json()))) == drawn
    with pytest.raises(DataError, match="have another form"):
        DrawnAnswers.from_json({"number": 5})


def test_a_call_in_the_background_is_given_up():
    began = threading.Event()

    def endless(check):
        while True:
            began.set()
            check()

    call = BackgroundCall(endless)
    assert began.wait(10)
    with pytest.raises(KeyError):
        call.wait(lambda: (_ for _ in ()).throw(KeyError("stop")))
    call.cancel()
    with pytest.raises(Exception, match=r"^$"):
        call.wait(lambda: None)
