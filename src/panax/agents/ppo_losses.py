"""The losses of PPO for each step of a rollout, and what is measured of them."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

Rows = Float[Array, "*rows"]

ValueClip = Literal["larger", "clipped"]


def policy_loss(log_ratio: Rows, advantage: Rows, *, clip: float, dual_clip: float | None = None) -> Rows:
    """The clipped surrogate: the smaller of the two gains, so that a step gains nothing from a ratio outside of 1 +- `clip`.

    Args:
        log_ratio: Logarithm of the new probability of each action over that which it was drawn with.
        dual_clip: Above 1: of actions that were worse than expected, no more than this many times the advantage is lost.

    Source: PPO (arXiv:1707.06347), equation 7; the dual clip is of arXiv:1912.09729, equation 5.

    >>> policy_loss(jnp.log(jnp.array([2.0, 8.0])), jnp.array([1.0, -1.0]), clip=0.5, dual_clip=3.0).tolist()
    [-1.5, 3.0]
    """
    ratio = jnp.exp(log_ratio)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1.0 - clip, 1.0 + clip) * advantage)
    if dual_clip is not None:
        gain = jnp.where(advantage < 0, jnp.maximum(gain, dual_clip * advantage), gain)
    return -gain


def value_loss(
    value: Rows, old_value: Rows, target: Rows, *, clip: float | None = None, form: ValueClip = "larger"
) -> Rows:
    """Half the squared error of predicted values.

    Args:
        clip: A value counts as no further from the old one than this; None leaves it.
        form: "larger" takes the larger of the errors with and without clipping, as OpenAI's baselines do; "clipped" the one with
            it, as stable-baselines3 does.

    >>> value_loss(jnp.array([3.0]), jnp.array([0.0]), jnp.array([1.0]), clip=1.0).tolist()
    [2.0]
    """
    error = (value - target) ** 2
    if clip is None:
        return 0.5 * error
    clipped = (old_value + jnp.clip(value - old_value, -clip, clip) - target) ** 2
    return 0.5 * (clipped if form == "clipped" else jnp.maximum(error, clipped))


def divergence(log_ratio: Rows) -> Rows:
    """An estimate of the KL divergence from the old policy to the new one, which is never negative: (r - 1) - log r.

    Source: Schulman, Approximating KL Divergence (2020), the estimator k3; stable-baselines3 stops by the same.
    """
    return jnp.expm1(log_ratio) - log_ratio


def outside(log_ratio: Rows, clip: float) -> Rows:
    """1 where the ratio is clipped, else 0."""
    return (jnp.abs(jnp.expm1(log_ratio)) > clip).astype(jnp.float32)


def explained_variance(predicted: Float[Array, "*steps"], target: Float[Array, "*steps"]) -> Float[Array, ""]:
    """1 where values are predicted exactly, 0 where a constant would do as well; NaN where all targets are the same."""
    return 1.0 - jnp.var(target - predicted) / jnp.var(target)
