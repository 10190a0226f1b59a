"""The loss of a value head: squared errors of the estimated returns, clipped around those before the update."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class ValueTerms(NamedTuple):
    """The loss of each action's value.

    Attributes:
        loss: Half of the squared error.
        clipped: True if the clipped error is the larger one, so that the value has no gradient.
    """

    loss: Float[Array, "batch seq"]
    clipped: Bool[Array, "batch seq"]


def value_loss(
    values: Float[Array, "batch seq"],
    returns: Float[Array, "batch seq"],
    old: Float[Array, "batch seq"] | None,
    clip: float | None,
) -> ValueTerms:
    """Return half of the larger one of two squared errors: that of the value, and that of the value clipped to within
    `clip` of the old one.

    Source: the clipped value loss of PPO's reference implementation (OpenAI Baselines), as in arXiv:2005.12729, section 3.

    Args:
        returns: Returns that the values estimate, as constants.
        old: Values before the first update of a rollout, as constants; not read without a clip.
        clip: Largest difference from the old value; None for no bound.

    >>> value_loss(jnp.array([[1.0]]), jnp.array([[2.0]]), jnp.array([[0.0]]), 0.5).loss.tolist()
    [[1.125]]
    """
    error = (values - returns) ** 2
    if clip is None or old is None:
        return ValueTerms(0.5 * error, jnp.zeros(values.shape, bool))
    bounded = (jnp.clip(values, old - clip, old + clip) - returns) ** 2
    return ValueTerms(0.5 * jnp.maximum(error, bounded), bounded > error)
