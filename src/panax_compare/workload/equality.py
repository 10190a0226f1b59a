"""The check that columns do the same work: their first losses must agree to within rounding.

The tolerance has two parts. A loss is a mean over many rows of a chain of a few hundred roundings, whose
errors add up like a random walk and average out over the rows: one step may differ by a few roundings of the
precision, relative to the loss. Training then amplifies a difference. The amplification is measured, not
guessed: the reference column is run once more from weights that are each moved by one rounding, and the other
columns may be `AMPLIFICATION` times as far from the reference as that run is.
"""

from collections.abc import Sequence
from typing import NamedTuple

from panax.core.finite_stats import max_finite

from .precision import Precision

ROUNDINGS = {"f32": 16, "tf32": 4, "bf16": 4, "bf16-mixed": 4}
"""Roundings of one step; more in float32, since libraries' exponentials and error functions themselves differ
by some roundings."""

AMPLIFICATION = 8
"""Factor of the measured amplification: one nudge of the weights represents the roundings of every operation,
and a single run of it can be off by a few times."""


class LossComparison(NamedTuple):
    """Result of the comparison of a column's losses.

    Attributes:
        is_equal: True if they agree with the reference's.
        max_distance: The largest difference, as a fraction of the tolerance.
        reason: The difference, if they don't agree.
    """

    is_equal: bool
    max_distance: float
    reason: str = ""


def tolerances(reference: Sequence[float], nudged: Sequence[float] | None, precision: str) -> list[float]:
    """Return the maximum distance of each loss from the reference's.

    Args:
        nudged: The reference's losses from nudged weights; None if they are unknown.
    """
    one_step = ROUNDINGS[precision] * Precision(precision).rounding
    limits, moved = [], 0.0
    for step, loss in enumerate(reference):
        if nudged is not None and step < len(nudged):
            moved = max_finite((moved, abs(nudged[step] - loss)))
        limits.append(one_step * abs(loss) + AMPLIFICATION * moved)
    return limits


def compare_losses(losses: Sequence[float], reference: Sequence[float], allowed: Sequence[float]) -> LossComparison:
    """Compare a column's losses with the reference's."""
    if len(losses) != len(reference):
        return LossComparison(
            False, float("inf"), f"{len(losses)} losses were recorded, the reference has {len(reference)}"
        )
    apart = 0.0
    for step, (loss, expected, limit) in enumerate(zip(losses, reference, allowed), 1):
        # Not `>`: a NaN loss does not agree.
        if not abs(loss - expected) <= limit:
            return LossComparison(
                False,
                abs(loss - expected) / limit if limit else float("inf"),
                f"the loss of step {step} is {loss:.6g}, the reference's {expected:.6g}; rounding explains {limit:.1g}",
            )
        apart = max(apart, abs(loss - expected) / limit if limit else 0.0)
    return LossComparison(True, apart)
