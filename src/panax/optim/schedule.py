"""The learning rate over the steps of a run."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from ..core.errors import RecipeError
from ..core.validated import Validated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule(Validated):
    """Linear warm-up to a peak, then a decay over what is left of the run.

    Attributes:
        peak: The highest learning rate.
        warmup_steps: Steps from 0 to the peak; a tenth of the run, with a warning, where a decay would have none left.
        decay: What follows the warm-up.
        final: The last learning rate as a share of the peak; has no effect with decay="constant".
    """

    peak: float = 1e-3
    warmup_steps: int = 0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    final: float = 0.1

    @classmethod
    def hint_for(cls, value: Any) -> str | None:
        """What to write where something else is given in a schedule's place; None where that is not known."""
        if isinstance(value, int | float):
            return f"write Schedule(peak={value})"
        return "wrap the function of the step: OwnSchedule(function=...)" if callable(value) else None

    def __post_init__(self) -> None:
        if self.peak <= 0:
            raise RecipeError(f"optimizer.schedule.peak={self.peak}; expected a positive learning rate")
        if self.warmup_steps < 0:
            raise RecipeError(f"optimizer.schedule.warmup_steps={self.warmup_steps}; expected 0 or more")
        if not 0.0 <= self.final <= 1.0:
            raise RecipeError(f"optimizer.schedule.final={self.final}; expected a share of the peak, in [0, 1]")

    def build(self, num_steps: int) -> optax.Schedule:
        """Step to learning rate, for a run of `num_steps`.

        Warns:
            UserWarning: The run is too short for the warm-up, which is shortened.

        >>> round(float(Schedule(peak=1.0, warmup_steps=10).build(110)(60)), 3)
        0.55
        """
        warmup = self.warmup_steps
        if self.decay != "constant" and warmup >= num_steps:
            warmup = num_steps // 10
            warnings.warn(
                f"optimizer.schedule.warmup_steps={self.warmup_steps} leaves nothing of the run's {num_steps} steps to decay in; "
                f"the rate rises over {warmup} of them",
                stacklevel=2,
            )
        rest = num_steps - warmup
        if self.decay == "cosine":
            after = optax.cosine_decay_schedule(self.peak, rest, self.final)
        elif self.decay == "linear":
            after = optax.linear_schedule(self.peak, self.peak * self.final, rest)
        else:
            after = optax.constant_schedule(self.peak)
        rising = optax.linear_schedule(self.peak / max(warmup, 1), self.peak, max(warmup - 1, 1))
        return optax.join_schedules([rising, after], [warmup]) if warmup else after


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnSchedule(Validated):
    """Any function of the step as a learning rate, such as one of optax's schedules.

    Attributes:
        function: Takes the step's number, an integer that is traced, from 0 on; returns the rate, a number of 0 or more.

    >>> import optax
    >>> float(OwnSchedule(function=optax.linear_schedule(1.0, 0.0, 10)).build(100)(5))
    0.5
    """

    function: Callable[[Any], Any]

    def build(self, num_steps: int) -> optax.Schedule:
        """Step to learning rate.

        Raises:
            RecipeError: The function can't be traced, or gives something else than a number.
        """

        def rate(step: Any) -> Any:
            # Under the promotion rules that it is written for, whatever stricter ones are set.
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return self.function(step)

        try:
            found = jax.eval_shape(rate, jax.ShapeDtypeStruct((), jnp.int32))
            shape, dtype = jnp.shape(found), jnp.result_type(found)
        except Exception as error:
            first, _, _ = str(error).partition("\n")
            raise RecipeError(
                f"optimizer.schedule: the function can't be traced with a step's number; compute with jax.numpy, and choose by "
                f"jnp.where in place of if: {type(error).__name__}: {first}"
            ) from error
        if shape or not jnp.issubdtype(dtype, jnp.number):
            raise RecipeError(
                f"optimizer.schedule: the function gives {dtype.name} of shape {shape} for a step; expected a number"
            )
        return rate
