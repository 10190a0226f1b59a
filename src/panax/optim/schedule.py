"""The learning rate over the steps of a run."""

import dataclasses
from typing import Literal

import optax

from ..core.errors import RecipeError
from ..core.validated import Validated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule(Validated):
    """Linear warm-up to a peak, then a decay over what is left of the run.

    Attributes:
        peak: The highest learning rate.
        warmup_steps: Steps from 0 to the peak.
        decay: What follows the warm-up.
        final: The last learning rate as a share of the peak; has no effect with decay="constant".
    """

    peak: float = 1e-3
    warmup_steps: int = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    final: float = 0.1

    def __post_init__(self) -> None:
        if self.peak <= 0:
            raise RecipeError(f"optimizer.schedule.peak={self.peak}; expected a positive learning rate")
        if self.warmup_steps < 0:
            raise RecipeError(f"optimizer.schedule.warmup_steps={self.warmup_steps}; expected 0 or more")
        if not 0.0 <= self.final <= 1.0:
            raise RecipeError(f"optimizer.schedule.final={self.final}; expected a share of the peak, in [0, 1]")

    def build(self, num_steps: int) -> optax.Schedule:
        """Step to learning rate, for a run of `num_steps`.

        >>> round(float(Schedule(peak=1.0, warmup_steps=10).build(110)(60)), 3)
        0.55
        """
        if self.decay != "constant" and self.warmup_steps >= num_steps:
            raise RecipeError(
                f"optimizer.schedule.warmup_steps={self.warmup_steps} leaves nothing of the run's {num_steps} steps to decay in; "
                f"use fewer, or decay='constant'"
            )
        rest = num_steps - self.warmup_steps
        if self.decay == "cosine":
            after = optax.cosine_decay_schedule(self.peak, rest, self.final)
        elif self.decay == "linear":
            after = optax.linear_schedule(self.peak, self.peak * self.final, rest)
        else:
            after = optax.constant_schedule(self.peak)
        warmup = optax.linear_schedule(self.peak / max(self.warmup_steps, 1), self.peak, max(self.warmup_steps - 1, 1))
        return optax.join_schedules([warmup, after], [self.warmup_steps]) if self.warmup_steps else after
