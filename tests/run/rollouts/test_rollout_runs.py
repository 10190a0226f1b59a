"""Runs that learn from their own answers: they improve, continue exactly, and name what fails."""

import dataclasses
import json
import os
import shutil
import signal
import threading
import time

import numpy as np
import pytest
from letter_runs import Ends, journal, params, run, same
from letters import MESHES, letters

from panax.checkpoint import CheckpointConfig
from panax.comms import Comms
from panax.core.errors import DataError, HookError, RecipeError, TrainingError
from panax.data import BatchRamp
from panax.kernels import Kernels
from panax.mesh import MeshShape
from panax.models import NextToken, PolicyGradient
from panax.optim import AdamW, Schedule, Sgd
from panax.rollouts.journal import JOURNAL_FILE
from panax.run import EvaluateConfig
from panax.run.reporting.history import read_history
from panax.train import StepConfig


def test_the_reward_rises_and_everything_is_logged(files, tmp_path):
    experiment = letters(files, directory=str(tmp_path / "run"), num_steps=25, evaluate=EvaluateConfig(every=25))
    result = run(experiment)
    rows = read_history(tmp_path / "run")
    first, last = (np.mean([row["rollout/reward"] for row in part]) for part in (rows[:3], rows[-3:]))
    assert last > 2.0 * first
    assert result.evaluation["reward"] > 2.0 * first and result.evaluation["loss"] == -result.evaluation["reward"]
    named = {
        "rollout/reward/share_of_letters",
        "rollout/length/mean",
        "rollout/truncated",
        "rollout/groups_without_signal",
    }
    named |= {"train/entropy", "train/gap/token", "train/gap/largest", "rollout/seconds/draw", "seconds/rollout"}
    assert named <= rows[-1].keys()
    assert max(row["train/gap/largest"] for row in rows) < 1e-4


def test_an_interrupted_run_draws_the_same_and_asks_for_no_reward_twice(files, tmp_path):
    (files / "mark").unlink(missing_ok=True)
    settings = {"reward": "counts_calls", "data": {"held_out": 0.0}, "checkpoint": letters(files).checkpoint}
    settings["checkpoint"] = dataclasses.replace(settings["checkpoint"], every=2)
    undisturbed = run(letters(files, directory=str(tmp_path / "one"), **settings))
    calls = len((files / "mark").read_text())
    assert calls == 6 * 16
    experiment = letters(files, directory=str(tmp_path / "two"), **settings)
    with pytest.raises(HookError):
        run(dataclasses.replace(experiment, hooks=(Ends(3),)))
    # The emergency save of step 3 is lost: rollout 3 is drawn again, and its rewards are in the journal.
    shutil.rmtree(tmp_path / "two" / "checkpoints" / "step_00000003", ignore_errors=True)
    said = []
    again = run(experiment, say=said.append)
    assert same(undisturbed, again)
    assert len((files / "mark").read_text()) == 2 * calls
    assert not any("different now" in line for line in said)
    assert [entry.number for entry in journal(tmp_path / "two")] == [1, 2, 3, 4, 5, 6]


def test_rewards_that_are_random_or_time_out_are_read_from_the_journal(files, tmp_path):
    for number, reward in enumerate(("any_number", "hangs_once")):
        folder = tmp_path / reward
        (files / "mark").unlink(missing_ok=True)
        data = {"failed_rewards": "exclude", "seed": number, "held_out": 0.0}
        experiment = letters(files, reward, data=data, directory=str(folder), num_steps=5)
        (timed,) = experiment.data.rewards
        experiment = dataclasses.replace(
            experiment, data=dataclasses.replace(experiment.data, rewards=(dataclasses.replace(timed, seconds=1.0),))
        )
        first = run(experiment)
        failed = sum(None in values for entry in journal(folder) for values in entry.rewards)
        assert failed == (1 if reward == "hangs_once" else 0)
        for step in (2, 3, 4, 5):
            shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
        assert same(first, run(experiment))


def test_several_updates_of_a_rollout_are_saved_at_its_end(files, tmp_path):
    experiment = letters(
        files,
        objective=PolicyGradient(several_updates=True, kl_weight=0.1),
        data={"epochs": 2, "minibatches": 2},
        num_steps=12,
        directory=str(tmp_path / "one"),
    )
    undisturbed = run(experiment)
    steps = sorted(int(path.name.removeprefix("step_")) for path in (tmp_path / "one" / "checkpoints").glob("step_*"))
    assert steps == [4, 8, 12]
    rows = read_history(tmp_path / "one")
    # The first update of a rollout is of the parameters that drew it.
    assert [row["train/ratio"] == pytest.approx(1.0, abs=1e-6) for row in rows] == [True, False, False, False] * 3
    assert rows[0]["train/kl"] == pytest.approx(0.0, abs=1e-6) and rows[-1]["train/kl"] > 1e-4
    for step in (8, 12):
        shutil.rmtree(tmp_path / "one" / "checkpoints" / f"step_{step:08d}")
    assert same(undisturbed, run(experiment))


def test_prompts_without_signal_are_replaced_and_the_run_resumes_exactly(files, tmp_path):
    settings = {"data": {"refills": 3, "held_out": 0.0, "samples": 8}, "num_steps": 5}
    few = run(
        letters(
            files, "some_prompts", directory=str(tmp_path / "few"), data={"held_out": 0.0, "samples": 8}, num_steps=5
        )
    )
    experiment = letters(files, "some_prompts", directory=str(tmp_path / "more"), **settings)
    more = run(experiment)
    lacking, filled = (
        [row["rollout/groups_without_signal"] for row in read_history(tmp_path / name)] for name in ("few", "more")
    )
    assert max(lacking) >= 0.5 and max(filled) == 0.0 and few.step == more.step == 5
    drawn = [row["rollout/prompts_drawn"] for row in read_history(tmp_path / "more")]
    assert min(drawn) >= 4.0 and max(drawn) > 4.0
    # Each batch of prompts is in the journal once, also those that were drawn in place of others.
    assert [entry.number for entry in journal(tmp_path / "more")] == list(range(1, int(sum(drawn)) // 4 + 1))
    for step in (3, 4, 5):
        shutil.rmtree(tmp_path / "more" / "checkpoints" / f"step_{step:08d}")
    assert same(more, run(experiment))
    assert len(journal(tmp_path / "more")) == sum(drawn) // 4


def test_a_signal_abandons_a_draw_and_other_rewards_are_asked_for(files, tmp_path):
    (slow,) = letters(files, "takes_long").data.rewards
    data = {"rewards": (dataclasses.replace(slow, seconds=60.0),)}
    experiment = letters(files, data=data, directory=str(tmp_path), num_steps=2)
    timer = threading.Timer(8.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    began = time.monotonic()
    stopped = run(experiment)
    assert (stopped.step, stopped.interrupted_by) == (0, "SIGTERM") and time.monotonic() - began < 25.0
    # Nothing was rewarded, and so nothing is in the journal.
    assert not (tmp_path / JOURNAL_FILE).exists()
    run(letters(files, "any_number", directory=str(tmp_path), num_steps=2), accept_changes=True)
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000002")
    said = []
    run(letters(files, "counts_calls", directory=str(tmp_path), num_steps=2), say=said.append, accept_changes=True)
    assert any("the rewards are others than those of rollout 2" in line for line in said)
    assert [entry.names for entry in journal(tmp_path)] == [("any_number",), ("any_number",), ("counts_calls",)]


def test_a_run_that_learns_nothing_says_so(files, tmp_path):
    said = []
    run(
        letters(files, "nothing", directory=str(tmp_path), num_steps=12, checkpoint=CheckpointConfig(every=0)),
        say=said.append,
    )
    (line,) = [line for line in said if "nothing is learned" in line]
    assert line.startswith("warning: step 10: in 10 rollouts in a row")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gap_is_nothing_with_one_policy(files, tmp_path, dtype):
    experiment = letters(files, kernels=Kernels(exact_policy=True), directory=str(tmp_path), num_steps=8)
    task = dataclasses.replace(experiment.task, compute_dtype=dtype)
    run(dataclasses.replace(experiment, task=task))
    assert [row["train/gap/largest"] for row in read_history(tmp_path)] == [0.0] * 8


def test_without_a_learning_rate_nothing_changes(files, tmp_path):
    experiment = letters(
        files, optimizer=AdamW(schedule=Schedule(peak=1e-30, warmup_steps=1), weight_decay=0.0), directory=str(tmp_path)
    )
    run(dataclasses.replace(experiment, num_steps=10))
    rows = read_history(tmp_path)
    assert len({row["train/parameter_norm"] for row in rows}) == 1
    assert max(row["train/gap/largest"] for row in rows) < 1e-5


@pytest.mark.parametrize(("shape", "devices"), MESHES)
def test_meshes_draw_and_learn_alike(files, tmp_path, shape, devices):
    results = []
    for number, (mesh, count) in enumerate(((MeshShape(), 1), (shape, devices))):
        parts = StepConfig(micro_batches=shape.stage)
        # Adam would turn the rounding of a small gradient into a large update.
        settings = {"mesh": mesh, "step": parts, "optimizer": Sgd(schedule=Schedule(peak=0.5, warmup_steps=1))}
        experiment = letters(files, directory=str(tmp_path / str(number)), num_steps=3, **settings)
        model = dataclasses.replace(experiment.task.model, num_layers=shape.stage)
        results.append(
            run(dataclasses.replace(experiment, task=dataclasses.replace(experiment.task, model=model)), count)
        )
    one, other = (journal(tmp_path / str(number)) for number in range(2))
    assert [entry.digests for entry in one] == [entry.digests for entry in other]
    for first, second in zip(*map(params, results), strict=True):
        np.testing.assert_allclose(first, second, atol=2e-5)


@pytest.mark.full
def test_sums_in_8_bits_over_replicas_move_parameters_as_one_device_does(files, tmp_path):
    """Each gradient is rounded twice, by half of a 127th of the largest of its block."""
    rate, count = 0.5, 4
    settings = {
        "optimizer": Sgd(schedule=Schedule(peak=rate, warmup_steps=0)),
        "step": StepConfig(clip_norm=None),
        "model": {"embed": 64, "ffn": 128},
        "num_steps": 1,
    }
    shape, sums = MeshShape(replica=count, fsdp=1), Comms(compress="int8", over=("replica",))
    start, one, other = (
        run(letters(files, directory=str(tmp_path / name), **settings | further), devices)
        for name, further, devices in (
            ("start", {"optimizer": Sgd(schedule=Schedule(peak=1e-30, warmup_steps=0))}, 1),
            ("one", {}, 1),
            ("other", {"mesh": shape, "comms": sums}, count),
        )
    )
    assert [e.digests for e in journal(tmp_path / "one")] == [e.digests for e in journal(tmp_path / "other")]
    differs = False
    for before, exact, coded in zip(*map(params, (start, one, other)), strict=True):
        moved = np.abs(exact - before).max()
        distance = np.abs(coded - exact).max()
        assert distance <= moved / 127 + 2e-5
        differs = differs or distance > 2e-5
    assert differs, "no sum was rounded"


def test_failed_rewards_end_the_run_or_are_left_out(files, tmp_path):
    data = {"held_out": 0.0, "batch_size": 16}
    experiment = letters(files, "fails_on_b", data=data, directory=str(tmp_path), num_steps=2)
    with pytest.raises(TrainingError, match=r"an answer has no reward: .*no b here.*Prompt: 'b'; answer"):
        run(experiment)
    # A failure that is mended is asked for again; the others are in the journal.
    (entry,) = journal(tmp_path)
    known = {place: values for place, values in enumerate(entry.rewards) if None not in values}
    assert 0 < len(known) <= 60
    (other,) = letters(files, "any_number").data.rewards
    data |= {"rewards": (dataclasses.replace(other, name="fails_on_b"),)}
    mended = letters(files, data=data, directory=str(tmp_path), num_steps=2)
    run(mended)
    again, later = journal(tmp_path)[1:]
    assert (again.number, later.number) == (1, 2) and not any(None in values for values in again.rewards)
    assert all(again.rewards[place] == values for place, values in known.items())
    said = []
    excluding = dataclasses.replace(experiment.data, failed_rewards="exclude")
    run(dataclasses.replace(experiment, data=excluding, directory=str(tmp_path / "two")), say=said.append)
    rows = read_history(tmp_path / "two")
    assert [row["train/answers"] for row in rows] == [60.0, 60.0]
    assert any(line.startswith("warning: 4 of 64 answers have no reward") for line in said)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": NextToken()}, "task.objective=PolicyGradient"),
        ({"data": {"temperature": 0.5}}, "set both to one value"),
        ({"data": {"epochs": 2}}, "several_updates=True"),
        ({"overfit_batches": 2}, "remove overfit_batches"),
        ({"held_out": [{}]}, "remove held_out"),
        ({"debug": True}, "remove debug"),
        ({"batch_ramp": BatchRamp(steps=2, parts=(2,))}, "remove batch_ramp"),
        ({"objective": PolicyGradient(several_updates=True)}, "several_updates=False"),
        ({"objective": PolicyGradient(loss="dr_grpo", max_answer=3)}, "max_answer=3 is less than data.tokens=6"),
        (
            {"objective": PolicyGradient(several_updates=True), "data": {"minibatches": 4}, "num_steps": 6},
            "set a multiple of it",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(files, tmp_path, settings, message):
    with pytest.raises(RecipeError, match=message):
        run(letters(files, directory=str(tmp_path), **settings))


def test_a_prompt_that_is_too_long_is_named_before_the_first_step(files, tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a long prompt"}) + "\n")
    experiment = letters(files, directory=str(tmp_path / "run"))
    data = dataclasses.replace(
        experiment.data,
        prompts=dataclasses.replace(experiment.data.prompts, paths=(str(tmp_path / "long.jsonl"),)),
        held_out=0.0,
    )
    with pytest.raises(DataError, match="has 13 tokens"):
        run(dataclasses.replace(experiment, data=data))
