"""The losses of PPO for each step of a rollout, and their diagnostics."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

Rows = Float[Array, "*rows"]

ValueClip = Literal["larger", "clipped"]


def policy_loss(log_ratio: Rows, advantage: Rows, *, clip: float, dual_clip: float | None = None) -> Rows:
    """Compute the clipped surrogate loss, in which a ratio outside of 1 +- `clip` gains nothing.

    Args:
        log_ratio: Log of each action's new probability over that with which it was sampled.
        dual_clip: Above 1; bounds the loss of actions with a negative advantage to this multiple of the
            advantage.

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
    """Compute half the squared error of predicted values.

    Args:
        clip: Clip range of a value around the old one; None for no clipping.
        form: "larger" uses the larger of the errors with and without clipping, as OpenAI's baselines do;
            "clipped" the error with clipping, as stable-baselines3 does.

    >>> value_loss(jnp.array([3.0]), jnp.array([0.0]), jnp.array([1.0]), clip=1.0).tolist()
    [2.0]
    """
    error = (value - target) ** 2
    if clip is None:
        return 0.5 * error
    clipped = (old_value + jnp.clip(value - old_value, -clip, clip) - target) ** 2
    return 0.5 * (clipped if form == "clipped" else jnp.maximum(error, clipped))


def approx_kl(log_ratio: Rows) -> Rows:
    """Estimate the KL divergence from the old to the new policy as (r - 1) - log r, which is never negative.

    Source: Schulman, Approximating KL Divergence (2020), the estimator k3; stable-baselines3 uses the same
    estimate for early stopping.
    """
    return jnp.expm1(log_ratio) - log_ratio


def clip_indicator(log_ratio: Rows, clip: float) -> Rows:
    """Return 1 if the ratio is clipped, else 0."""
    return (jnp.abs(jnp.expm1(log_ratio)) > clip).astype(jnp.float32)


def explained_variance(predicted: Float[Array, "*steps"], target: Float[Array, "*steps"]) -> Float[Array, ""]:
    """Compute the explained variance: 1 for exact predictions, 0 for a constant; NaN if all targets are
    equal.
    """
    return 1.0 - jnp.var(target - predicted) / jnp.var(target)
