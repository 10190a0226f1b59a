"""`find_lr`: a short run with an exponentially rising learning rate, and the rate that its losses recommend.

The range test of Smith (arXiv:1506.01186): if the rate is too low the loss does not move, then it falls, and
if the rate is too high it rises again.
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ...core.errors import DataError, RecipeError
from ...core.finite_stats import min_finite
from ...core.validation import Validated
from ...job.join import check_single_process
from ...optim import CustomSchedule, Schedule
from ..entry import check_experiment
from ..experiment import Experiment
from ..feed import prefetch_to_device
from ..opened_data import LogFn
from ..preparation import PreparedRun, prepare, refuse_rollouts
from .lr_curve import RATE_DIVISOR, RateSearch
from .lr_page import write_page

MIN_STEPS = 20
"""Minimum number of steps of a curve."""

MIN_LOSS_DECREASE = 0.01
"""Share of its first value by which a loss has to fall at least to be informative."""

DIVERGENCE_DECREASE = 0.05
"""Share by which a loss must have fallen for its return to the first value to count as divergence."""

NOISE_FACTOR = 3.0
"""Multiple of its usual change from step to step by which a loss has to fall to be informative."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RateRange(Validated):
    """Range of learning rates to try.

    Attributes:
        lowest: The first step's rate.
        highest: The last step's rate.
        steps: Number of steps from the lowest to the highest, each by the same factor.
        smoothing: Weight of the running mean in the smoothed losses, which are corrected for the beginning.
    """

    lowest: float = 1e-6
    highest: float = 1.0
    steps: int = 100
    smoothing: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.lowest < self.highest or not math.isfinite(self.highest):
            raise RecipeError(
                f"lowest={self.lowest:g}, highest={self.highest:g}; expected rates above 0, the first below the second"
            )
        if self.steps < MIN_STEPS:
            raise RecipeError(f"steps={self.steps}; expected {MIN_STEPS} or more: fewer points make no curve")
        if not 0 <= self.smoothing < 1:
            raise RecipeError(f"smoothing={self.smoothing}; expected a share in [0, 1), such as 0.9")

    def rate(self, step: int) -> float:
        """Return the rate of a step, counted from 0.

        >>> round(RateRange(lowest=1e-4, highest=1e-2, steps=21).rate(10), 6)
        0.001
        """
        return self.lowest * (self.highest / self.lowest) ** (step / (self.steps - 1))


def find_lr(
    experiment: Experiment,
    *,
    lowest: float = RateRange.lowest,
    highest: float = RateRange.highest,
    steps: int = RateRange.steps,
    smoothing: float = RateRange.smoothing,
    output: str | Path | None = None,
    say: LogFn = lambda line: None,
) -> RateSearch:
    """Train for a few steps with a rising learning rate, and recommend a rate. Nothing is saved; the run's
    folder is not touched.

    The step is that of the experiment, with its batches, clipping and mesh. The test ends when the loss is
    not finite, or is back above its first value after it had fallen.

    Args:
        output: A file for a page with the curve; None writes none.
        say: Called with messages for the user, a line at a time.

    Raises:
        RecipeError: A rate or a number of steps is invalid, or the optimizer has its own learning rate.
        DataError: The data ends too soon, or the page can't be written.
    """
    check_experiment(experiment, "find_lr")
    refuse_rollouts(experiment, "find_lr")
    rates = RateRange(lowest=lowest, highest=highest, steps=steps, smoothing=smoothing)
    check_single_process("find_lr")
    usual = experiment.optimizer
    # Any batch size and a run long enough for any warm-up will do: this only checks that there is a rate.
    if usual.scale_to_batch(1).reported_rate(2**30) is None:
        raise RecipeError(
            f"{type(usual).__name__} has a built-in learning rate, so none can be tried; use an optimizer of panax.optim, or a "
            f"transformation that leaves the rate to the schedule, with Optax(transformation=..., of_schedule=True)"
        )
    rising = CustomSchedule(function=lambda step: lowest * (highest / lowest) ** (jnp.float32(step) / (steps - 1)))
    test_experiment = dataclasses.replace(
        experiment, optimizer=dataclasses.replace(usual, schedule=rising), num_steps=rates.steps
    )
    prepared = prepare(test_experiment, say)
    losses, rows = _losses(prepared, rates)
    search = analyze_lr_range_test(losses, rates, _per_peak(usual.schedule, rows))
    if output is not None:
        write_page(search, experiment.name, output)
    return search


def _per_peak(schedule: Schedule | CustomSchedule, rows: int) -> float:
    """Return the learning rate of the run for a peak of 1, by the schedule's rule for the batch size."""
    return schedule.scale_to_batch(rows).peak / schedule.peak if isinstance(schedule, Schedule) else 1.0


def _losses(prepared: PreparedRun, rates: RateRange) -> tuple[list[float], int]:
    """Train and return (the losses of the steps, the rows of a batch)."""
    step, state, losses, rows = prepared.step, prepared.step.init(prepared.experiment.seed), [], 0
    with contextlib.closing(prefetch_to_device(prepared.data.train, step, max_batches=rates.steps)) as batches:
        for batch, _, _ in batches:
            rows = jax.tree.leaves(batch)[0].shape[0]
            state, scalars = step(state, batch)
            losses.append(float(scalars["loss"]))
            if has_diverged(losses, rates.smoothing):
                break
    if len(losses) < min(rates.steps, MIN_STEPS) and not has_diverged(losses, rates.smoothing):
        raise DataError(
            f"the data ended after {len(losses)} steps; provide more, or smaller batches: {MIN_STEPS} are a curve"
        )
    return losses, rows


def smooth_losses(losses: Sequence[float], smoothing: float) -> list[float]:
    """Compute the running mean of losses, corrected for its beginning.

    >>> smooth_losses([4.0, 2.0], 0.5)
    [4.0, 2.6666666666666665]
    """
    smoothed, mean = [], 0.0
    for count, loss in enumerate(losses, start=1):
        mean = smoothing * mean + (1 - smoothing) * loss
        smoothed.append(mean / (1 - smoothing**count))
    return smoothed


def has_diverged(losses: Sequence[float], smoothing: float) -> bool:
    """Return True if the last loss is not finite, or the smoothed one is back above the first after it had
    fallen, or far above it."""
    if not losses:
        return False
    if not math.isfinite(losses[-1]):
        return True
    smoothed, first = smooth_losses(losses, smoothing), _first(losses)
    # A loss that is not finite stays in all means after it: no comparison would detect anything.
    if not math.isfinite(smoothed[-1]):
        return True
    fell = first - min_finite(smoothed) > DIVERGENCE_DECREASE * abs(first)
    return (fell and smoothed[-1] > first) or smoothed[-1] > first + abs(first) / 2


def _first(losses: Sequence[float]) -> float:
    """Estimate the initial loss from the first few, since any one of them may be an outlier."""
    finite = [loss for loss in losses[:5] if math.isfinite(loss)]
    return min(finite[0], float(np.median(finite))) if finite else math.nan


def analyze_lr_range_test(losses: Sequence[float], rate_range: RateRange, per_peak: float = 1.0) -> RateSearch:
    """Derive a recommendation from the losses of a range test."""
    smoothed = smooth_losses(losses, rate_range.smoothing)
    rates = [rate_range.rate(step) for step in range(len(losses))]
    finite = [n for n, loss in enumerate(smoothed) if math.isfinite(loss)]
    diverged = has_diverged(losses, rate_range.smoothing)
    reason = _why_none(losses, smoothed, finite, diverged)
    recommended = steepest = None
    if not reason:
        lowest = min_finite(finite, key=lambda n: smoothed[n])
        slopes = np.gradient([smoothed[n] for n in finite[: lowest + 1]])
        steepest = rates[int(np.argmin(slopes))]
        recommended = rates[lowest] / RATE_DIVISOR
    return RateSearch(
        tuple(rates), tuple(losses), tuple(smoothed), recommended, steepest, diverged,
        None if recommended is None else recommended / per_peak, reason,
    )  # fmt: skip


def _why_none(losses: Sequence[float], smoothed: Sequence[float], finite: Sequence[int], diverged: bool) -> str:
    """Return the reason why a curve does not allow a recommendation; empty if it does."""
    if len(finite) < 3:
        return "the loss was not finite almost from the beginning: use a lower --lowest, or look for the cause with --debug"
    lowest = min_finite(finite, key=lambda n: smoothed[n])
    first = _first([losses[n] for n in finite])
    fall = first - smoothed[lowest]
    moves = np.diff([losses[n] for n in finite[: lowest + 1]])
    noise = float(np.median(np.abs(moves))) if len(moves) else 0.0
    # Averaged over the memory of the smoothing, noise is smaller than from step to step: a cautious bound.
    if fall <= max(MIN_LOSS_DECREASE * abs(first), min(NOISE_FACTOR * noise, abs(first) / 4)):
        if diverged:
            return "the loss rose before it had fallen: use a lower --lowest"
        return (
            "the loss did not fall: use a higher --highest, or more --steps; if it never does, the model does not learn"
        )
    if lowest == len(losses) - 1:
        return "the loss still falls at the highest rate: use a higher --highest"
    return ""
