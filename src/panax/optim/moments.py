"""Running means of gradients and of their squares, as in Adam and related optimizers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..core.errors import RecipeError
from .parameter import Parameter
from .sharded.sharded_optimizer import StateSpec, UpdateInputs

MEAN, SQUARE = "mean", "square"


class Moments(NamedTuple):
    """Running means of gradients and of squared gradients."""

    mean: jax.Array
    square: jax.Array

    @staticmethod
    def state_specs(parameter: Parameter) -> dict[str, StateSpec]:
        return {MEAN: StateSpec.like(parameter), SQUARE: StateSpec.like(parameter, signed=False)}

    @classmethod
    def update(cls, inputs: UpdateInputs, b1: float, b2: float) -> "Moments":
        """Compute the moments after this step's gradient."""
        mean, square = (inputs.state[kind].astype(inputs.gradient.dtype) for kind in (MEAN, SQUARE))
        return cls(
            b1 * mean + (1 - b1) * inputs.gradient,
            b2 * square + (1 - b2) * jnp.square(inputs.gradient),
        )

    def direction(self, inputs: UpdateInputs, b1: float, b2: float, epsilon: float) -> jax.Array:
        """Compute Adam's direction: the bias-corrected mean over the root of the bias-corrected squares
        (arXiv:1412.6980)."""
        mean = self.mean / bias_correction(b1, inputs.num_updates)
        square = self.square / bias_correction(b2, inputs.num_updates)
        return mean / (jnp.sqrt(square) + epsilon)

    @property
    def arrays(self) -> dict[str, jax.Array]:
        return {MEAN: self.mean, SQUARE: self.square}


def adamw_step(inputs: UpdateInputs, b1: float, b2: float, epsilon: float) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute AdamW's update (arXiv:1711.05101): the change to add to a parameter, and its new state."""
    moments = Moments.update(inputs, b1, b2)
    direction = moments.direction(inputs, b1, b2, epsilon)
    return -inputs.rate * (direction + inputs.decay * inputs.value), moments.arrays


def bias_correction(decay: float, before: jax.Array) -> jax.Array:
    """Return the divisor that corrects a zero-initialized running mean after `before + 1` updates."""
    return 1 - jnp.power(jnp.asarray(decay, before.dtype), before + 1)


def check_decay_rates(**rates: float) -> None:
    """Check that each argument is a valid decay rate of a running mean.

    Raises:
        RecipeError: A rate is outside [0, 1).
    """
    for name, rate in rates.items():
        if not 0 <= rate < 1:
            raise RecipeError(f"optimizer.{name}={rate}; expected a decay rate in [0, 1), such as 0.9")
