"""Generalized advantage estimation that distinguishes truncation (a time limit) from termination."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Advantages(NamedTuple):
    """Advantages and value targets of each step of a rollout.

    Attributes:
        advantage: Estimated return minus the state's predicted value.
        target: Target of the state's value: the advantage plus the predicted value.
    """

    advantage: Float[Array, "time environment"]
    target: Float[Array, "time environment"]


def gae(
    reward: Float[Array, "time environment"],
    value: Float[Array, "time environment"],
    next_value: Float[Array, "time environment"],
    terminated: Bool[Array, "time environment"],
    truncated: Bool[Array, "time environment"],
    *,
    discount: float,
    gae_lambda: float,
) -> Advantages:
    """Compute advantages as sums of temporal differences, decayed by `discount * gae_lambda` per step up to the
    episode's end.

    The next value of a step that terminates its episode is 0. A step that truncates it bootstraps from the
    value of the next state, since a time limit does not affect that value; only the sum ends there.

    Args:
        value: Predicted for the state before each step.
        next_value: Predicted for the state that each step led to, before any reset.
        discount: Discount factor per step (gamma).
        gae_lambda: Lambda: 0 uses a single temporal difference, 1 all rewards to the episode's end.

    Source: High-Dimensional Continuous Control Using Generalized Advantage Estimation (arXiv:1506.02438),
    equation 16.

    >>> one = lambda x: jnp.array([[x]])
    >>> truncated = gae(one(1.0), one(0.0), one(10.0), one(False), one(True), discount=0.5, gae_lambda=1.0)
    >>> terminated = gae(one(1.0), one(0.0), one(10.0), one(True), one(False), discount=0.5, gae_lambda=1.0)
    >>> truncated.target.item(), terminated.target.item()
    (6.0, 1.0)
    """
    difference = reward + discount * jnp.where(terminated, 0.0, next_value) - value
    decay = jnp.where(terminated | truncated, 0.0, discount * gae_lambda)

    def earlier(after: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        step_advantage = step[0] + step[1] * after
        return step_advantage, step_advantage

    _, advantage = jax.lax.scan(earlier, jnp.zeros_like(value[0]), (difference, decay), reverse=True)
    return Advantages(advantage, advantage + value)
