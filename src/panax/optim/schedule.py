"""Learning-rate schedules."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..core.errors import RecipeError
from ..core.validation import Validated

Decay = Literal["cosine", "linear", "sqrt", "constant", "inverse_sqrt"]

_ENDLESS = ("constant", "inverse_sqrt")
"""Decays that do not depend on the length of the run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule(Validated):
    """Linear warm-up to a peak, an optional plateau, then decay over the rest of the run.

    Attributes:
        peak: The highest learning rate.
        warmup_steps: Steps from 0 to the peak; shortened to a tenth of the run, with a warning, if no steps
            remain for the decay.
        stable: Fraction of the steps after warm-up at which the peak is held, as in warmup-stable-decay
            (WSD).
        decay: Shape of the decay. sqrt: one minus the square root of the elapsed fraction, which falls fast
            first (arXiv:2405.18392). inverse_sqrt: the square root of warm-up steps over all steps
            (arXiv:1706.03762).
        cycles: Number of decays of equal length, each restarting from the peak (arXiv:1608.03983).
        final: The final learning rate as a fraction of the peak; has no effect with decay="constant" or
            "inverse_sqrt".
        per_batch: How `peak`, which holds for batches of `base_batch` rows, scales with the batch size:
            linear, usual for SGD and LARS (arXiv:1706.02677), or sqrt, usual for Adam and LAMB
            (arXiv:1904.00962).
    """

    peak: float = 1e-3
    warmup_steps: int = 0
    stable: float = 0.0
    decay: Decay = "cosine"
    cycles: int = 1
    final: float = 0.1
    per_batch: Literal["same", "linear", "sqrt"] = "same"
    base_batch: int | None = None

    @classmethod
    def hint_for(cls, value: Any) -> str | None:
        """Return a suggestion for a value passed where a schedule is expected; None if there is none."""
        if isinstance(value, int | float):
            return f"write Schedule(peak={value})"
        return "wrap the function of the step: CustomSchedule(function=...)" if callable(value) else None

    def __post_init__(self) -> None:
        if self.peak <= 0:
            raise RecipeError(f"optimizer.schedule.peak={self.peak}; expected a positive learning rate")
        if self.warmup_steps < 0:
            raise RecipeError(f"optimizer.schedule.warmup_steps={self.warmup_steps}; expected 0 or more")
        if not 0.0 <= self.final <= 1.0:
            raise RecipeError(f"optimizer.schedule.final={self.final}; expected a share of the peak, in [0, 1]")
        if not 0.0 <= self.stable < 1.0:
            raise RecipeError(f"optimizer.schedule.stable={self.stable}; expected a share of the run, in [0, 1)")
        if self.cycles < 1:
            raise RecipeError(f"optimizer.schedule.cycles={self.cycles}; expected 1 or more")
        for name, usual in (("stable", 0.0), ("cycles", 1)):
            if self.decay in _ENDLESS and getattr(self, name) != usual:
                raise RecipeError(
                    f'optimizer.schedule.{name}={getattr(self, name)} has no effect with decay="{self.decay}", which has no end; '
                    f"use cosine, linear or sqrt"
                )
        if self.decay == "inverse_sqrt" and not self.warmup_steps:
            raise RecipeError(
                'optimizer.schedule.decay="inverse_sqrt" falls by the steps of the warm-up; set '
                "optimizer.schedule.warmup_steps to 1 or more"
            )

        if self.per_batch != "same" and self.base_batch is None:
            raise RecipeError(
                f"optimizer.schedule.per_batch={self.per_batch!r} scales the peak with the batch size; set "
                "optimizer.schedule.base_batch to the number of rows for which the peak was tuned"
            )
        if self.base_batch is not None and (self.per_batch == "same" or self.base_batch < 1):
            raise RecipeError(
                f"optimizer.schedule.base_batch={self.base_batch}; expected 1 row or more, and "
                "optimizer.schedule.per_batch for the growth of the peak"
            )

    def scale_to_batch(self, rows: int) -> "Schedule":
        """Scale the peak to batches of `rows` rows, by the rule of `per_batch`.

        >>> Schedule(peak=1e-3, per_batch="sqrt", base_batch=64).scale_to_batch(1024).peak
        0.004
        """
        if self.base_batch is None:
            return self
        ratio = rows / self.base_batch
        peak = self.peak * (ratio if self.per_batch == "linear" else math.sqrt(ratio))
        return dataclasses.replace(self, peak=peak, per_batch="same", base_batch=None)

    def build(self, num_steps: int) -> optax.Schedule:
        """Build the function from step to learning rate, for a run of `num_steps`.

        Raises:
            RecipeError: The peak depends on the batch size, and `scale_to_batch` has not been called.

        Warns:
            UserWarning: The run is too short for the warm-up, which is shortened.

        >>> round(float(Schedule(peak=1.0, warmup_steps=10).build(110)(60)), 3)
        0.55
        >>> plateau = Schedule(peak=1.0, stable=0.8, decay="linear", final=0.0).build(100)
        >>> [round(float(plateau(step)), 3) for step in (0, 80, 90, 100)]
        [1.0, 1.0, 0.5, 0.0]
        """
        if self.base_batch is not None:
            raise RecipeError(
                "optimizer.schedule depends on the number of rows in a batch; pass it to scale_to_batch(rows)"
            )
        warmup = self.warmup_steps
        if self.decay not in _ENDLESS and warmup >= num_steps:
            warmup = num_steps // 10
            warnings.warn(
                f"optimizer.schedule.warmup_steps={self.warmup_steps} leaves nothing of the run's {num_steps} steps to decay in; "
                f"the rate rises over {warmup} of them",
                stacklevel=2,
            )
        after = self._build_after_warmup(num_steps - warmup)
        rising = optax.linear_schedule(self.peak / max(warmup, 1), self.peak, max(warmup - 1, 1))
        return optax.join_schedules([rising, after], [warmup]) if warmup else after

    def _build_after_warmup(self, num_steps: int) -> optax.Schedule:
        """Build the schedule of the `num_steps` steps after the warm-up."""
        if self.decay == "constant":
            return optax.constant_schedule(self.peak)
        if self.decay == "inverse_sqrt":
            return lambda step: self.peak * jnp.sqrt(self.warmup_steps / (self.warmup_steps + jnp.asarray(step)))
        plateau_steps = round(self.stable * num_steps)
        length = max(num_steps - plateau_steps, 1) / self.cycles

        def falling(step: Any) -> Any:
            passed = jnp.asarray(step, jnp.float32) / length
            # Hold the final rate after the last cycle instead of restarting.
            share = jnp.where(passed >= self.cycles, 1.0, passed % 1.0)
            left = {
                "cosine": 0.5 * (1 + jnp.cos(jnp.pi * share)),
                "linear": 1 - share,
                "sqrt": 1 - jnp.sqrt(share),
            }[self.decay]
            return self.peak * (self.final + (1 - self.final) * left)

        return (
            optax.join_schedules([optax.constant_schedule(self.peak), falling], [plateau_steps])
            if plateau_steps
            else falling
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomSchedule(Validated):
    """A custom function of the step as the learning rate, such as one of optax's schedules.

    Attributes:
        function: Takes the step, a traced integer that counts from 0; returns the learning rate, which must
            not be negative.

    >>> import optax
    >>> float(CustomSchedule(function=optax.linear_schedule(1.0, 0.0, 10)).build(100)(5))
    0.5
    """

    function: Callable[[Any], Any]

    def scale_to_batch(self, rows: int) -> "CustomSchedule":
        """Return itself: a custom function has no scaling rule."""
        return self

    def build(self, num_steps: int) -> optax.Schedule:
        """Build the function from step to learning rate.

        Raises:
            RecipeError: The function cannot be traced, returns something other than a scalar number, or
                returns a negative rate.
        """

        def rate(step: Any) -> Any:
            # User code is written for JAX's standard promotion rules, even if stricter ones are set.
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return self.function(step)

        try:
            output = jax.eval_shape(rate, jax.ShapeDtypeStruct((), jnp.int32))
            shape, dtype = jnp.shape(output), jnp.result_type(output)
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
        _check_not_negative(rate, num_steps)
        return rate


def _check_not_negative(rate: Callable[[Any], Any], num_steps: int) -> None:
    """Check up to 1,024 evenly spaced steps for a negative rate, which would increase the loss."""
    steps = np.unique(np.linspace(0, max(num_steps - 1, 0), 1024).astype(np.int32))
    try:
        with jax.ensure_compile_time_eval(), warnings.catch_warnings():
            # A rate that is not finite is reported by the step that uses it.
            warnings.simplefilter("ignore")
            rates = np.asarray(jax.vmap(rate)(jnp.asarray(steps)), np.float64)
    except Exception:
        # A function that cannot be vmapped may still work inside a step.
        return
    negative = np.flatnonzero(rates < 0)
    if negative.size:
        first = negative[0]
        raise RecipeError(
            f"optimizer.schedule: the function gives {rates[first]:.3g} at step {steps[first]}; expected a learning rate of 0 or "
            f"more: below 0, updates make the loss larger. Clip it: jnp.maximum(rate, 0.0)"
        )
