"""Targets of action values, and the losses of DQN and SAC for each transition."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Rows = Float[Array, " batch"]
Flags = Bool[Array, " batch"]
Values = Float[Array, "batch action"]

ErrorForm = Literal["huber", "squared"]


def td_target(reward: Rows, terminated: Flags, next_value: Rows, *, discount: float) -> Rows:
    """Compute the target: the reward plus the discounted next value, unless the episode terminated.

    A transition truncated by a time limit is not terminated: its next state has a value.

    >>> one = lambda x: jnp.array([x])
    >>> td_target(one(1.0), one(False), one(10.0), discount=0.5).tolist()
    [6.0]
    >>> td_target(one(1.0), one(True), one(10.0), discount=0.5).tolist()
    [1.0]
    """
    return reward + discount * jnp.where(terminated, 0.0, next_value)


def best_value(target_values: Values, own_values: Values | None = None) -> Rows:
    """Return the target network's value of the best action.

    Args:
        own_values: The online network's values, which then select the best action (double Q-learning), so
            that selection and evaluation do not share their noise.

    Source: Deep Reinforcement Learning with Double Q-learning (arXiv:1509.06461), equation 4.
    """
    if own_values is None:
        return target_values.max(axis=-1)
    return action_value(target_values, own_values.argmax(axis=-1).astype(jnp.int32))


def action_value(values: Values, action: Int[Array, " batch"]) -> Rows:
    """Select the value of the action taken."""
    # A mask instead of a gather: its transpose is a multiplication, that of a gather a scatter.
    return jnp.where(action[:, None] == jnp.arange(values.shape[1])[None], values, 0.0).sum(axis=-1)


def dueling_values(advantage: Values, value: Rows) -> Values:
    """Combine the state's value and the advantages, less their mean, into action values.

    Source: Dueling Network Architectures for Deep Reinforcement Learning (arXiv:1511.06581), equation 9.

    >>> dueling_values(jnp.array([[1.0, 3.0]]), jnp.array([10.0])).tolist()
    [[9.0, 11.0]]
    """
    return value[:, None] + advantage - advantage.mean(axis=-1, keepdims=True)


def td_loss(value: Rows, target: Rows, *, form: ErrorForm) -> Rows:
    """Compute half the squared error, or the Huber loss, which is linear beyond an error of 1.

    >>> td_loss(jnp.array([0.5, 3.0]), jnp.zeros(2), form="huber").tolist()
    [0.125, 2.5]
    """
    distance = jnp.abs(value - target)
    square = 0.5 * distance * distance
    return square if form == "squared" else jnp.where(distance <= 1.0, square, distance - 0.5)


def soft_value(values: Float[Array, "critic batch"], log_prob: Rows, temperature: Float[Array, ""]) -> Rows:
    """Compute a state's soft value from a sampled action: the minimum of the critics' values plus the entropy
    term.

    Source: Soft Actor-Critic Algorithms and Applications (arXiv:1812.05905), equation 3.
    """
    return values.min(axis=0) - temperature * log_prob


def temperature_loss(log_temperature: Float[Array, ""], log_prob: Rows, *, target_entropy: float) -> Rows:
    """Compute the loss that raises the temperature if the policy's entropy is below its target, and lowers it
    if above.

    It uses the temperature's logarithm, as the authors' code and stable-baselines3 do; equation 18 of
    arXiv:1812.05905 uses the temperature itself.
    """
    return -log_temperature * jax.lax.stop_gradient(log_prob + target_entropy)
