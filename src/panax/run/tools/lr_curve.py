"""The result of a range test of learning rates."""

import dataclasses
import json
import math

RATE_DIVISOR = 10.0
"""Divisor of the rate at the lowest smoothed loss, which gives the recommended rate."""


@dataclasses.dataclass(frozen=True, repr=False)
class RateSearch:
    """Result of a range test.

    Attributes:
        rates: The rate of each step taken.
        losses: The losses of these steps' batches, before their updates.
        smoothed: The smoothed losses.
        recommended: A tenth of the rate at the lowest smoothed loss; None if the curve does not allow a
            recommendation.
        steepest: The rate at which the smoothed loss falls fastest, by the logarithm of the rate; None if no
            rate is recommended.
        diverged: True if the losses ended the test before the highest rate.
        peak: The value for `optimizer.schedule.peak`: the recommended rate, divided by the factor of its
            batch-size rule.
        why: Why no rate is recommended, and what to do; empty if one is.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    recommended: float | None
    steepest: float | None
    diverged: bool
    peak: float | None
    why: str = ""

    def __repr__(self) -> str:
        return f"RateSearch({self.why or f'recommended {self.recommended:.3g}'})"

    def to_json(self) -> str:
        """Return all fields as JSON; losses that are not finite are null."""
        values = dataclasses.asdict(self)
        for name in ("losses", "smoothed"):
            values[name] = [loss if math.isfinite(loss) else None for loss in values[name]]
        return json.dumps(values, indent=1)
