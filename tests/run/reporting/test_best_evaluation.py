"""The best evaluation is saved, whatever the intervals; settings that exclude each other are refused before it begins."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import panax
from panax.checkpoint import CheckpointConfig, open_checkpoint
from panax.checkpoint.memory import MemoryConfig
from panax.core import DataError, LayoutError
from panax.data import IterableSource
from panax.hooks import EarlyStopping, Hook, TargetReached
from panax.mesh import MeshShape
from panax.optim import AdamW, CustomSchedule, Schedule, Sgd
from panax.run import EvaluateConfig
from panax.run.parts.run_part import RunProgress
from panax.run.recovery.best_evaluation import BestEvaluation
from panax.run.recovery.checkpointing import CheckpointSchedule
from panax.run.setting_checks import interval_notes
from panax.run.tools.lr_search import has_diverged
from panax.run.tools.sweep import Sweep, Trial

pytestmark = pytest.mark.filterwarnings("ignore:this source can't resume exactly")


class Line(eqx.Module):
    w: jax.Array

    def __init__(self, key):
        self.w = jnp.full((4,), 0.1)


def squares(model, batch):
    return jnp.mean((batch["x"] @ model.w - batch["y"]) ** 2)


def batches(count=40, rows=8):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(count, rows, 4)).astype(np.float32)
    return [{"x": each, "y": each[:, 0] * 2 - each[:, 1]} for each in x]


def experiment(tmp_path, **settings):
    usual = {
        "task": panax.adapters.equinox.task(lambda key: Line(key), squares),
        "data": batches(),
        "held_out": batches(2),
        # A rate that overshoots: the second evaluation is the best, and the loss grows from there on.
        "optimizer": Sgd(schedule=Schedule(peak=2.0, decay="constant")),
        "num_steps": 10,
        "log_every": 1,
        "directory": str(tmp_path / "run"),
    }
    return panax.Experiment(name="best", **{**usual, **settings})


def fitted(given, **settings):
    lines: list[str] = []
    return panax.fit(given, say=lines.append, devices=jax.devices()[:1], **settings), lines


def saved(tmp_path):
    return sorted(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step_*"))


@pytest.mark.parametrize(
    ("evaluates", "saves", "kept"),
    [
        pytest.param(1, 20, [2, 10], id="more often"),
        pytest.param(2, 3, [2, 9, 10], id="intervals that do not divide"),
    ],
)
def test_the_best_evaluation_is_saved_between_two_saves(tmp_path, evaluates, saves, kept):
    configured = experiment(
        tmp_path,
        evaluate=EvaluateConfig(every=evaluates),
        checkpoint=CheckpointConfig(every=saves, keep_last=len(kept) - 1),
        hooks=(EarlyStopping(patience=20),),
    )
    result, lines = fitted(configured)
    assert saved(tmp_path) == kept
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    judged = {row["step"]: row["evaluation/loss"] for row in rows if "evaluation/loss" in row}
    best = open_checkpoint(str(tmp_path / "run" / "checkpoints" / f"step_{kept[0]:08d}"))
    assert best.manifest.metric == min(judged.values()) == judged[kept[0]] < result.evaluation["loss"]
    assert not [line for line in lines if "has no checkpoint" in line]


def test_without_saves_on_the_way_the_run_states_that_the_best_is_lost(tmp_path):
    _, lines = fitted(experiment(tmp_path, evaluate=EvaluateConfig(every=1), checkpoint=CheckpointConfig(every=0)))
    assert saved(tmp_path) == [10]
    (line,) = [line for line in lines if "has no checkpoint" in line]
    assert "at step 2" in line and "checkpoint.every=0" in line


def test_a_resumed_run_knows_the_best_evaluation_before(tmp_path):
    given = experiment(tmp_path, evaluate=EvaluateConfig(every=1), checkpoint=CheckpointConfig(every=20, keep_last=1))
    fitted(dataclasses.replace(given, num_steps=5))
    assert saved(tmp_path) == [2, 5]
    fitted(dataclasses.replace(given, num_steps=6))
    assert saved(tmp_path) == [2, 6], "step 6 is worse than step 2, which stays"


def test_a_loss_that_is_no_number_is_never_the_best_and_hides_none():
    nothing: Any = None
    schedule = CheckpointSchedule(CheckpointConfig(), nothing, nothing, nothing, nothing)

    def must_save(step: int, evaluation: Mapping[str, float]) -> bool:
        run = RunProgress(nothing, step, None, step, (schedule,))
        run.record_evaluation(evaluation)
        return run.must_save

    assert not must_save(1, {"loss": math.nan}) and schedule.best is None
    assert must_save(2, {"loss": 3.0})
    assert not must_save(3, {"loss": -math.inf}) and not must_save(4, {}) and not must_save(5, {"loss": 3.0})
    assert schedule.best == BestEvaluation(3.0, 2)
    assert must_save(6, {"loss": 2.0})
    for attachment in (None, {"loss": math.nan, "step": 1}, {"loss": "x", "step": 1}, {"loss": 1.0}):
        assert BestEvaluation.of(attachment) is None


def test_sweeps_and_hooks_pass_over_what_is_not_finite(tmp_path):
    trials = [Trial({"a": n}, "", evaluation={"loss": loss}) for n, loss in enumerate((math.nan, 2.0, -math.inf, 1.0))]
    result = Sweep("folder", tuple(trials))
    assert result.best is trials[3]
    assert [trial.settings["a"] for trial in result.ranked] == [3, 1, 0, 2]
    with pytest.raises(panax.core.RecipeError, match="no trial of the sweep in folder has a finite loss"):
        _ = Sweep("folder", tuple(trials[::2])).best
    stopped: list[str] = []

    class Running:
        step = 1
        stop = staticmethod(stopped.append)

    target = TargetReached(target=1.0)
    for value in (math.nan, -math.inf):
        target.after_evaluation(Running, {"loss": value})  # pyright: ignore[reportArgumentType]
    assert not stopped
    assert has_diverged([4.0, math.nan, 3.0, 2.0], 0.9)
    assert not has_diverged([4.0, 3.9, 3.8], 0.9)


def test_a_best_within_min_delta_is_named_though_patience_runs_on():
    class Running:
        step = 0
        stopped = ""

        def stop(self, reason):
            self.stopped = reason

    run, hook = Running(), EarlyStopping(patience=2, min_delta=0.5)
    for run.step, loss in ((1, 3.0), (2, 2.9), (3, 2.8)):
        hook.after_evaluation(run, {"loss": loss})  # pyright: ignore[reportArgumentType]
    assert run.stopped.endswith("has not improved in 2 comparisons, best 2.8000 at step 3")
    again = EarlyStopping(patience=2, min_delta=0.5)
    again.restore({"best": 3.0, "best_step": 1, "waited": 1})  # As versions before have saved it.
    again.after_evaluation(run, {"loss": 2.9})  # pyright: ignore[reportArgumentType]
    assert "2 comparisons" in run.stopped


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (
            Schedule(peak=1e-2),
            "the learning rate goes from 0.00232 at step 4 to 0.0055 at step 5, since its schedule is recomputed",
        ),
        (Schedule(peak=1e-2, decay="constant"), "the learning rate stays at 0.01"),
        (CustomSchedule(function=lambda step: 0.1 / (1 + step)), "goes from 0.025 at step 4 to 0.02 at step 5"),
    ],
    ids=["cosine", "constant", "own"],
)
def test_a_finished_run_that_gets_more_steps_states_both_rates(tmp_path, schedule, words):
    given = experiment(tmp_path, optimizer=AdamW(schedule=schedule), held_out=None, num_steps=4)
    fitted(given)
    _, lines = fitted(dataclasses.replace(given, num_steps=8))
    (line,) = [line for line in lines if line.startswith("changed since that checkpoint: num_steps: 4 -> 8")]
    assert words in line


class Ranged:
    """A custom source, with batches of rows that are counted."""

    axes = {"x": ("batch", None), "y": ("batch",)}  # noqa: RUF012
    resume = "replay"

    def __init__(self, given):
        self.given = given

    def batches(self, position=None):
        yield from IterableSource(self.given, epochs=1).batches(position)


@pytest.mark.parametrize("source", [list, iter, Ranged], ids=["list", "iterator", "source"])
def test_held_out_rows_that_the_devices_can_not_share_are_refused_before_the_first_step(tmp_path, source):
    given = experiment(tmp_path, held_out=source(batches(2, rows=6)), mesh=MeshShape(fsdp=4))
    with pytest.raises(LayoutError, match=r"^held-out data \(evaluation\): a batch of 6 rows is not divisible by 4"):
        panax.fit(given, quiet=True, devices=jax.devices()[:4])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_held_out_leaves_of_other_names_are_refused_and_no_batch_is_lost(tmp_path):
    renamed = [{"z": batch["x"], "y": batch["y"]} for batch in batches(2)]
    with pytest.raises(DataError, match=r"held-out data \(evaluation\): the batch's leaves are \['y', 'z'\]"):
        fitted(experiment(tmp_path, held_out=renamed))
    result, _ = fitted(experiment(tmp_path, held_out=iter(batches(2)), num_steps=1))
    assert result.evaluation["loss"] == pytest.approx(panax.evaluate(result, data=batches(2))["loss"], rel=1e-6)


def test_an_evaluation_that_raises_at_the_end_does_not_cost_the_steps_before(tmp_path):
    def ends_badly():
        yield batches(1)[0]
        raise RuntimeError("the disk is gone")

    class Held:
        __iter__ = staticmethod(ends_badly)

    with pytest.raises(RuntimeError, match="the disk is gone"):
        fitted(experiment(tmp_path, held_out=Held(), evaluate=EvaluateConfig(every=0)))
    assert saved(tmp_path) == [10]


def test_intervals_that_have_less_effect_than_they_seem_to_are_reported(tmp_path):
    def notes(**settings):
        return list(interval_notes(experiment(tmp_path, **settings)))

    assert notes() == notes(checkpoint=CheckpointConfig(every=10, keep_every=50)) == []
    (line,) = notes(checkpoint=CheckpointConfig(every=30, keep_every=100))
    assert "only those of each 300 steps are kept for good; 90 or 120 would keep one at each" in line
    (line,) = notes(checkpoint=CheckpointConfig(every=0, keep_every=100))
    assert "checkpoint.every=0 saves at the end alone" in line
    (line,) = notes(checkpoint=CheckpointConfig(every=10, memory=MemoryConfig(every=20)))
    assert "checkpoint.memory.every=20 is not below checkpoint.every=10" in line
    (line,) = notes(evaluate=EvaluateConfig(every=5), hooks=(EarlyStopping(patience=2),))
    assert "EarlyStopping(patience=2) can't end this run: evaluate.every=5 compares 2 times in num_steps=10" in line
    assert not notes(evaluate=EvaluateConfig(every=5), num_steps=20, hooks=(EarlyStopping(patience=2), Hook()))


def test_an_evaluation_is_left_where_the_run_is_to_stop():
    from panax.run.parts.step_batches import EvaluationStopped, _followed

    asked = iter([False, False, True])
    followed = _followed([("a", 0, 0), ("b", 0, 0), ("c", 0, 0)], lambda: next(asked))  # type: ignore[list-item]
    assert [next(followed), next(followed)] == ["a", "b"]
    with pytest.raises(EvaluationStopped):
        next(followed)
