"""Hooks that end a run early: no more improvement, target reached, time limit."""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any, Literal

from ..core.errors import RecipeError, suggest_name
from ..core.validation import Validated
from .hook import Hook, RunView

EVALUATION, STEPS, QUESTIONS = "evaluation/", "train/", "questions/"


def _needs_evaluations(hook: Hook, metric: str, run: RunView) -> None:
    """Raise a RecipeError if the metric is one of evaluations or questions, and the run has none."""
    if metric.startswith(QUESTIONS):
        if not run.experiment.questions.every:
            raise RecipeError(
                f"{type(hook).__name__} compares {metric!r}, and this run asks no questions between its steps: set "
                f"questions.files, and questions.every above 0"
            )
    elif not metric.startswith(STEPS) and not run.evaluates:
        raise RecipeError(
            f"{type(hook).__name__} compares {metric!r} after each evaluation, and this run has none between its steps: give it "
            f"held-out data and evaluate.every above 0, or a metric of the steps, such as 'train/loss'"
        )


def _found(metric: str, values: Mapping[str, float]) -> float:
    name = metric.removeprefix(EVALUATION)
    if name not in values:
        raise RecipeError(f"unknown metric {metric!r}: {suggest_name(name, values)}")
    return values[name]


def _were_asked(run: RunView) -> bool:
    """Return True if the run has asked its questions after this step: a signal abandons them, and at the last step they are
    asked later."""
    is_due = run.step % run.experiment.questions.every == 0 and run.step < run.experiment.num_steps
    return is_due and not run.stopping


class _Watching(Hook):
    """Base of hooks that pass one metric to `_compare`: of the steps (`train/...`, at each report), of questions
    (`questions/...`, whenever they are asked) or of evaluations.
    """

    metric: str

    def _compare(self, run: RunView, value: float) -> None:
        raise NotImplementedError

    def before_run(self, run: RunView) -> None:
        _needs_evaluations(self, self.metric, run)

    def after_step(self, run: RunView) -> None:
        if self.metric.startswith(STEPS) and run.step % run.experiment.log_every == 0:
            self._compare(run, _found(self.metric, run.read()))
        elif self.metric.startswith(QUESTIONS) and _were_asked(run):
            self._compare(run, _found(self.metric, run.values))

    def after_evaluation(self, run: RunView, evaluation: Mapping[str, float]) -> None:
        if not self.metric.startswith((STEPS, QUESTIONS)):
            self._compare(run, _found(self.metric, evaluation))


@dataclasses.dataclass
class EarlyStopping(_Watching, Validated):
    """Hook that ends the run if a metric has not improved for `patience` consecutive comparisons.

    Attributes:
        metric: Name of a metric of the evaluations (`loss`, `accuracy`); with the prefix `train/`, of the steps, compared
            at each report; with the prefix `questions/`, of questions (`questions/choices/acc`).
        patience: Number of comparisons without an improvement that ends the run.
        min_delta: A change must exceed this to count as an improvement.
        mode: Direction of improvement: a smaller or a larger value.
    """

    metric: str = "loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.patience < 1 or self.min_delta < 0:
            raise RecipeError(
                f"EarlyStopping(patience={self.patience}, min_delta={self.min_delta}); expected at least 1 and at least 0"
            )
        self.restore(None)

    def before_run(self, run: RunView) -> None:
        super().before_run(run)
        if (self.metric.removeprefix(EVALUATION), self.mode) != ("loss", "min"):
            run.say(
                f"EarlyStopping compares {self.metric} ({self.mode}), and checkpoints are kept by the lowest held-out loss: the "
                f"step that it calls best may have none (checkpoint.keep_last, checkpoint.keep_every)"
            )
        if self._waited >= self.patience:
            run.stop(self._reason())

    def _compare(self, run: RunView, value: float) -> None:
        sign = 1.0 if self.mode == "min" else -1.0
        if math.isfinite(value) and (self._best is None or sign * value < sign * self._best):
            # The reported best; one that is better by less than `min_delta` does not reset the count.
            self._best, self._best_step = value, run.step
        better = self._reference is None or sign * value < sign * self._reference - self.min_delta
        if better and math.isfinite(value):
            self._reference, self._waited = value, 0
        else:
            self._waited += 1
        if self._waited >= self.patience:
            run.stop(self._reason())

    def _reason(self) -> str:
        best = "no number yet" if self._best is None else f"best {self._best:.4f} at step {self._best_step}"
        return f"EarlyStopping: {self.metric} has not improved in {self._waited} comparisons, {best}"

    def state(self) -> Any:
        return {"best": self._best, "best_step": self._best_step, "waited": self._waited, "reference": self._reference}

    def restore(self, state: Any) -> None:
        state = state or {}
        self._best: float | None = state.get("best")
        self._best_step: int = state.get("best_step", 0)
        self._waited: int = state.get("waited", 0)
        # The reference of improvements; states of earlier versions store it as the best.
        self._reference: float | None = state.get("reference", self._best)


@dataclasses.dataclass
class TargetReached(_Watching, Validated):
    """Hook that ends the run as soon as a metric reaches a target.

    Attributes:
        target: The value to reach.
        metric: Name of a metric of the evaluations (`loss`, `accuracy`); with the prefix `train/`, of the steps, compared
            at each report; with the prefix `questions/`, of questions (`questions/choices/acc`).
        mode: Required relation of the value to the target: at most, or at least.
    """

    target: float
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        self.restore(None)

    def before_run(self, run: RunView) -> None:
        super().before_run(run)
        # Reached before a resumption; with another target it is compared again.
        if self._value is not None:
            self._compare(run, self._value)

    def _compare(self, run: RunView, value: float) -> None:
        self._value = value
        if math.isfinite(value) and (value <= self.target if self.mode == "min" else value >= self.target):
            run.stop(f"TargetReached: {self.metric} is {value:.4f}, the target is {self.target:g}")

    def state(self) -> Any:
        return {"value": None if self._value is None or not math.isfinite(self._value) else self._value}

    def restore(self, state: Any) -> None:
        self._value: float | None = (state or {}).get("value")


@dataclasses.dataclass
class TimeLimit(Hook, Validated):
    """Hook that ends the run after a time limit, which includes the time before a resumption.

    Attributes:
        hours: Added to minutes and seconds.
        minutes: Added to hours and seconds.
        seconds: Added to hours and minutes.
    """

    hours: float = 0.0
    minutes: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.limit_seconds > 0 or min(self.hours, self.minutes, self.seconds) < 0:
            raise RecipeError(f"{self}; expected a time above 0")
        self.restore(None)

    @property
    def limit_seconds(self) -> float:
        """Return the total limit, in seconds."""
        return self.hours * 3600 + self.minutes * 60 + self.seconds

    def before_run(self, run: RunView) -> None:
        self._since = time.monotonic()
        self._stop_if_due(run)

    def after_step(self, run: RunView) -> None:
        self._stop_if_due(run)

    def _stop_if_due(self, run: RunView) -> None:
        taken = self._taken()
        if taken >= self.limit_seconds:
            run.stop(f"TimeLimit: {taken:.0f} s of {self.limit_seconds:.0f} s have passed")

    def _taken(self) -> float:
        return self._before + (0.0 if self._since is None else time.monotonic() - self._since)

    def state(self) -> Any:
        return {"seconds": self._taken()}

    def restore(self, state: Any) -> None:
        self._before: float = (state or {}).get("seconds", 0.0)
        self._since: float | None = None
