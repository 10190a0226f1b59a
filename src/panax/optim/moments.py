"""Running means of gradients, as Adam and its kin keep them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..core.errors import RecipeError
from .on_shards import StateSpec, UpdateInputs
from .parameter import Parameter

MEAN, SQUARE = "mean", "square"


class Moments(NamedTuple):
    """The mean of gradients and of their squares."""

    mean: jax.Array
    square: jax.Array

    @staticmethod
    def keeps(parameter: Parameter) -> dict[str, StateSpec]:
        return {MEAN: StateSpec.like(parameter), SQUARE: StateSpec.like(parameter, signed=False)}

    @classmethod
    def after(cls, taken: UpdateInputs, b1: float, b2: float) -> "Moments":
        """Moved towards a gradient."""
        mean, square = (taken.kept[kind].astype(taken.gradient.dtype) for kind in (MEAN, SQUARE))
        return cls(
            b1 * mean + (1 - b1) * taken.gradient,
            b2 * square + (1 - b2) * jnp.square(taken.gradient),
        )

    def direction(self, taken: UpdateInputs, b1: float, b2: float, epsilon: float) -> jax.Array:
        """Adam's: the mean over the root of the squares, each corrected for having begun with zeros (arXiv:1412.6980)."""
        mean = self.mean / bias_correction(b1, taken.before)
        square = self.square / bias_correction(b2, taken.before)
        return mean / (jnp.sqrt(square) + epsilon)

    @property
    def kept(self) -> dict[str, jax.Array]:
        return {MEAN: self.mean, SQUARE: self.square}


def adamw_step(taken: UpdateInputs, b1: float, b2: float, epsilon: float) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Adam's step with decoupled weight decay (arXiv:1711.05101): what is added to a parameter, and what is kept now."""
    moments = Moments.after(taken, b1, b2)
    direction = moments.direction(taken, b1, b2, epsilon)
    return -taken.rate * (direction + taken.decay * taken.value), moments.kept


def bias_correction(decay: float, before: jax.Array) -> jax.Array:
    """What a running mean that began with zeros is divided by, after so many updates and one more."""
    return 1 - jnp.power(jnp.asarray(decay, before.dtype), before + 1)


def check_decay_rates(**rates: float) -> None:
    """Refuse what is not the decay rate of a running mean.

    Raises:
        RecipeError: It is not in [0, 1).
    """
    for name, rate in rates.items():
        if not 0 <= rate < 1:
            raise RecipeError(f"optimizer.{name}={rate}; expected a decay rate in [0, 1), such as 0.9")
