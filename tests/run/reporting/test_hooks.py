"""Hooks: they are called at the right steps, may request work, are resumed, and never cost a run its checkpoint."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from panax import Experiment, fit, hooks, open_run
from panax.checkpoint import CheckpointConfig
from panax.core import RecipeError, named_leaves
from panax.core.errors import HookError
from panax.data import TextData
from panax.hooks import EarlyStopping, Histograms, Hook, Samples, TargetReached, TimeLimit
from panax.metrics import Tracker
from panax.models import DecoderConfig, DecoderTask
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig, Run
from panax.run.reporting.history import read_history

STEADY = AdamW(schedule=Schedule(peak=3e-3, decay="constant"))


@pytest.fixture
def short(experiment):
    return dataclasses.replace(experiment, num_steps=6, log_every=2, optimizer=STEADY)


class Told(Hook):
    """Writes down when it is called."""

    def __init__(self, **asks):
        self.calls, self.asks, self.kept = [], asks, "never"

    def before_run(self, run):
        self.calls.append(("before_run", run.step))

    def after_step(self, run):
        self.calls.append(("after_step", run.step))
        for step in self.asks.get("evaluate", ()):
            if run.step == step:
                run.evaluate()
        if run.step == self.asks.get("save"):
            run.save()
        if run.step == self.asks.get("stop"):
            run.stop("it was enough")
        if run.step == self.asks.get("raise"):
            raise ZeroDivisionError("a hook's own mistake")

    def after_evaluation(self, run, evaluation):
        self.calls.append(("after_evaluation", run.step, round(evaluation["loss"], 6)))

    def before_save(self, run):
        self.calls.append(("before_save", run.step))

    def at_end(self, run):
        self.calls.append(("at_end", run.step))

    def state(self):
        return {"calls": len(self.calls)}

    def restore(self, state):
        self.kept = state


def checkpoints(experiment):
    return sorted(path.name for path in (Path(experiment.folder) / "checkpoints").glob("step_*"))


def test_a_hook_is_called_in_order_asks_and_is_resumed(short):
    short = dataclasses.replace(
        short, evaluate=EvaluateConfig(every=5, batches=1),
        checkpoint=dataclasses.replace(short.checkpoint, every=4, keep_last=9),
    )  # fmt: skip
    told = Told(evaluate=(2,), save=3, stop=5)
    result = fit(dataclasses.replace(short, hooks=(told,)), quiet=True)
    assert result.step == 5 and result.stopped == "it was enough" and result.interrupted_by is None
    assert "stopped by it was enough" in repr(result)
    names = [(name, step) for name, step, *_ in told.calls]
    assert names == [
        ("before_run", 0), ("after_step", 1), ("after_step", 2), ("after_evaluation", 2), ("before_save", 2),
        ("after_step", 3), ("before_save", 3), ("after_step", 4), ("before_save", 4), ("after_step", 5),
        ("after_evaluation", 5), ("before_save", 5), ("at_end", 5),
    ]  # fmt: skip
    assert told.kept is None and checkpoints(short) == [f"step_0000000{step}" for step in (2, 3, 4, 5)]
    # What is left of the run, by another set of hooks: the second of a class has its own state, here none.
    again, second = Told(), Told()
    result = fit(dataclasses.replace(short, hooks=(again, second)), quiet=True)
    assert result.step == 6 and not result.stopped
    assert again.kept == {"calls": 12} and second.kept is None and again.calls[0] == ("before_run", 5)


def test_a_hook_that_raises_is_named_and_the_run_saves_first(short):
    broken = dataclasses.replace(short, hooks=(Told(), Told(**{"raise": 3})))
    with pytest.raises(
        HookError, match=r"hook Told-2 raised in after_step after step 3.*ZeroDivisionError: a hook"
    ) as caught:
        fit(broken, quiet=True)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert checkpoints(short)[-1] == "step_00000003" and "step_00000003" in str(caught.value)
    assert fit(dataclasses.replace(short, hooks=()), quiet=True).step == 6


@pytest.mark.parametrize(
    "method",
    [
        "before_run",
        "at_end",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("restore", "before_save", "state", "after_evaluation")
        ),
    ],
)
def test_whichever_method_raises_what_was_trained_is_kept(short, method):
    def fail(self, *arguments):
        raise OSError("no")

    broken = type("Broken", (Hook,), {method: fail})()
    with pytest.raises(HookError, match=r"hook Broken raised .*OSError: no"):
        fit(dataclasses.replace(short, hooks=(broken,), evaluate=EvaluateConfig(every=2, batches=1)), quiet=True)
    assert bool(checkpoints(short)) == (method not in ("before_run", "restore"))


@pytest.mark.slow
def test_a_second_interrupt_inside_of_a_hook_saves_first(short):
    class Hangs(Hook):
        def after_step(self, run):
            if run.step == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(dataclasses.replace(short, hooks=(Hangs(),)), quiet=True)
    assert checkpoints(short)[-1] == "step_00000002"


def test_a_state_that_json_cannot_hold_is_named(short):
    class Keeps(Hook):
        def state(self):
            return {"array": np.zeros(2)}

    with pytest.raises(HookError, match=r"hook Keeps raised in state.*not JSON serializable"):
        fit(dataclasses.replace(short, hooks=(Keeps(),)), quiet=True)
    assert checkpoints(short)


def running(step=0, evaluates=True, values=None, log_every=1):
    """What the shipped hooks ask of a run."""
    number = step

    class Asked(Run):
        step = number
        experiment = type("Settings", (), {"log_every": log_every, "num_steps": 100})
        values, batch, state, prepared, say, stopped = {}, {}, None, None, print, ""

        def __init__(self):
            pass

        @property
        def evaluates(self):
            return evaluates

        def stop(self, reason):
            self.stopped = reason

        def read(self):
            return values or {}

    return Asked()


def evaluated(hook, losses, name="loss"):
    """The number of evaluations after which the hook stopped the run; None if it never did."""
    for number, loss in enumerate(losses, start=1):
        run = running(step=10 * number)
        hook.after_evaluation(run, {name: loss})
        if run.stopped:
            return number
    return None


def test_early_stopping_counts_what_does_not_improve():
    assert evaluated(EarlyStopping(patience=2), [3.0, 2.0, 2.5, 2.1]) == 4
    assert evaluated(EarlyStopping(patience=2), [3.0, 2.0, 2.5, 1.9, 2.0]) is None
    assert evaluated(EarlyStopping(patience=2, min_delta=0.5), [3.0, 2.8, 2.6]) == 3
    assert evaluated(EarlyStopping(metric="accuracy", mode="max", patience=1), [0.1, 0.2, 0.2], "accuracy") == 3
    assert evaluated(EarlyStopping(patience=2), [float("nan"), float("nan")]) == 2
    hook = EarlyStopping(patience=2)
    evaluated(hook, [2.0, 2.5])
    other = EarlyStopping(patience=2)
    other.restore(json.loads(json.dumps(hook.state())))
    assert evaluated(other, [2.1]) == 1
    run = running(step=30)
    other.before_run(run)
    assert "loss has not improved in 2 comparisons, best 2.0000 at step 10" in run.stopped
    other.restore(None)
    assert evaluated(other, [9.0]) is None


def test_a_target_ends_the_run_and_another_one_continues():
    hook = TargetReached(target=2.0)
    assert evaluated(hook, [2.5, 2.0]) == 2
    further = TargetReached(target=1.5)
    further.restore(hook.state())
    run = running()
    further.before_run(run)
    assert not run.stopped
    hook.before_run(run)
    assert run.stopped == "TargetReached: loss is 2.0000, the target is 2"
    steps = TargetReached(target=0.9, metric="train/accuracy", mode="max")
    run = running(step=5, values={"train/accuracy": 0.95}, log_every=5)
    steps.after_step(run)
    assert run.stopped


def test_a_time_limit_counts_what_was_taken_before():
    hook = TimeLimit(minutes=1.0)
    hook.restore({"seconds": 59.9})
    run = running()
    hook.before_run(run)
    assert not run.stopped and 59.9 <= hook.state()["seconds"] < 60
    hook.restore({"seconds": 60.0})
    hook.before_run(run)
    assert run.stopped.startswith("TimeLimit: 60 s of 60 s")


def test_a_metric_that_does_not_exist_or_is_never_measured_is_refused(short):
    with pytest.raises(
        RecipeError, match=r"hook EarlyStopping: EarlyStopping compares 'loss' after each evaluation.*none between"
    ):
        fit(dataclasses.replace(short, hooks=(EarlyStopping(),), evaluate=EvaluateConfig(every=0)), quiet=True)
    with pytest.raises(
        HookError, match=r"hook TargetReached raised.*unknown metric 'accurac': did you mean 'accuracy'"
    ):
        fit(
            dataclasses.replace(
                short, hooks=(TargetReached(target=1.0, metric="accurac"),), evaluate=EvaluateConfig(every=2, batches=1)
            ),
            quiet=True,
        )
    for wrong in (
        lambda: EarlyStopping(patience=0), lambda: EarlyStopping(min_delta=-1.0), lambda: TimeLimit(), lambda: Samples(every=0),
        lambda: TimeLimit(hours=-1.0, minutes=90.0), lambda: Histograms(every=0), lambda: Samples(prompts=()),
    ):  # fmt: skip
        with pytest.raises(RecipeError):
            wrong()


class Kept(Tracker):
    """Records its calls."""

    def __init__(self):
        self.texts, self.histograms, self.records, self.facts = {}, {}, [], None

    def about(self, run):
        self.facts = run

    def record(self, step, values):
        self.records.append((step, dict(values)))

    def text(self, step, name, text):
        self.texts[step, name] = text

    def histogram(self, step, name, histogram):
        self.histograms[step, name] = histogram


def test_samples_and_histograms_reach_the_trackers(short):
    tracker = Kept()
    used = (Samples(every=4, prompts=("def ",), tokens=5, temperature=0.0), Histograms(every=6))
    lines: list[str] = []
    result = fit(dataclasses.replace(short, hooks=used, trackers=(tracker,)), say=lines.append)
    assert tracker.facts.name == short.name and len(tracker.facts.run_id) == 16
    assert tracker.facts.flat()["optimizer.schedule.peak"] == 3e-3
    assert [step for step, _ in tracker.texts] == [4, 6]
    assert tracker.texts[6, "samples/0 def"] == "def " + result.generate("def ", tokens=5, temperature=0.0)
    names = {name for _, name in tracker.histograms}
    assert {name.removeprefix("weights/") for name in names if name.startswith("weights/")} == {
        name.removeprefix("gradients/") for name in names if name.startswith("gradients/")
    }
    leaves = named_leaves(result.state.params)
    for name, leaf in leaves.items():
        actual, values = tracker.histograms[6, f"weights/{name}"], np.asarray(leaf, np.float64)
        assert actual.counts.sum() == values.size and actual.least == np.float32(values.min())
        np.testing.assert_allclose(actual.total, values.sum(), atol=1e-3)
        counts, _ = np.histogram(values, bins=actual.edges.astype(np.float64))
        # A value that lies on an edge may fall on either side of it in float32.
        assert np.abs(counts - actual.counts).sum() <= max(2, values.size // 50)
    assert all("seconds/hooks" in values for _, values in tracker.records if "seconds/step" in values)
    assert any(actual.squares > 0 for (_, name), actual in tracker.histograms.items() if name.startswith("gradients/"))


def test_a_signal_while_samples_are_drawn_leaves_the_others_and_saves(short, monkeypatch):
    def drawn(*arguments, **settings):
        os.kill(os.getpid(), signal.SIGTERM)
        return "x"

    monkeypatch.setattr("panax.run.parts.run_actions.generate_text", drawn)
    tracker, lines = Kept(), []
    samples = Samples(every=4, prompts=("a", "b", "c"), tokens=5)
    result = fit(dataclasses.replace(short, hooks=(samples,), trackers=(tracker,)), say=lines.append)
    assert result.interrupted_by == "SIGTERM" and result.step == 4 and checkpoints(short) == ["step_00000004"]
    assert [name for _, name in tracker.texts] == ["samples/0 a"]
    assert "samples of step 4: 1 of 3 were drawn when the run was ended" in lines


def test_a_custom_loop_without_hooks_may_request_what_hooks_may(short):
    with open_run(dataclasses.replace(short, checkpoint=CheckpointConfig(every=0)), quiet=True) as run:
        for batch in run:
            if run.step == 1:
                run.save()
                run.evaluate()
            if run.step == 3:
                run.stop("enough")
            run.after_step(run.take_step(batch))
        with pytest.raises(RecipeError, match="no step follows after step 4, since the run was ended by a hook"):
            run.after_step({})
    assert run.result is not None and run.result.stopped == "enough" and run.result.step == 4
    assert checkpoints(short) == ["step_00000002", "step_00000004"]
    evaluated_steps = [row["step"] for row in read_history(short.folder) if "evaluation/loss" in row]
    assert evaluated_steps == [2, 4]


@pytest.mark.slow
def test_histograms_are_the_same_on_a_mesh(short):
    from panax.mesh import MeshShape

    results = []
    for number, mesh in enumerate((MeshShape(), MeshShape(fsdp=2, tensor=2))):
        tracker = Kept()
        fit(
            dataclasses.replace(
                short, num_steps=1, hooks=(Histograms(every=1),), trackers=(tracker,), mesh=mesh,
                directory=f"{short.folder}-{number}",
            ),
            quiet=True, devices=jax.devices()[: 4 if number else 1],
        )  # fmt: skip
        results.append(tracker.histograms)
    one, many = results
    assert one.keys() == many.keys() and len(one) > 10
    for key, histogram in one.items():
        np.testing.assert_allclose(histogram.squares, many[key].squares, rtol=1e-3)
        assert histogram.counts.sum() == many[key].counts.sum()


def test_a_slow_or_raising_tracker_holds_nothing_up(short):
    class Raises(Tracker):
        def record(self, step, values):
            raise ValueError("no server")

        def about(self, run):
            raise ValueError("no server")

    tracker, lines = Kept(), []
    fit(dataclasses.replace(short, trackers=(Raises(), tracker)), say=lines.append)
    assert [line for line in lines if "Raises" in line] == [
        "warning: Raises can't be written, and training continues without it: ValueError: no server"
    ]
    assert [step for step, values in tracker.records if "train/loss" in values] == [2, 4, 6]


def test_a_loop_of_ones_own_keeps_everything(short):
    told = Told()
    mine = dataclasses.replace(short, hooks=(told,), num_steps=4)
    with open_run(mine, quiet=True) as run:
        for batch in run:
            scalars = run.take_step(batch)
            run.after_step({"loss": scalars["loss"], "mine": 2.0 * run.step})
            if run.step == 3:
                break
    assert run.result.step == 3 and checkpoints(short)[-1] == "step_00000003" and told.calls[-1] == ("at_end", 3)
    with open_run(mine, quiet=True) as run:
        for batch in run:
            run.after_step(run.take_step(batch))
    assert run.result.step == 4
    uninterrupted = fit(dataclasses.replace(mine, directory=f"{short.folder}-whole"), quiet=True)
    # The data went on where it was, the step's own rate and bits too.
    assert run.result.evaluation == uninterrupted.evaluation
    rows = [json.loads(line) for line in (Path(short.folder) / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/mine"] for row in rows if "train/mine" in row] == [2.0]
    with (
        pytest.raises(RecipeError, match=r"call run\.after_step"),
        open_run(dataclasses.replace(mine, num_steps=6, hooks=()), quiet=True) as run,
    ):
        for _batch in run:
            pass


def test_names_are_complete():
    assert {"EarlyStopping", "Samples", "Histograms", "TargetReached", "TimeLimit", "Hook", "RunView"} <= set(
        hooks.__all__
    )
    assert Experiment(task=DecoderTask(model=DecoderConfig()), data=TextData()).hooks == ()
