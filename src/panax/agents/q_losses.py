"""What values of actions are trained towards, and the losses of DQN and SAC for each transition."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Rows = Float[Array, " batch"]
Flags = Bool[Array, " batch"]
Values = Float[Array, "batch action"]

ErrorForm = Literal["huber", "squared"]


def target_of(reward: Rows, terminated: Flags, next_value: Rows, *, discount: float) -> Rows:
    """The reward, and the discounted value of what followed unless the episode terminated there.

    A transition that a time limit cut is not terminated: what followed has its value.

    >>> one = lambda x: jnp.array([x])
    >>> target_of(one(1.0), one(False), one(10.0), discount=0.5).tolist()
    [6.0]
    >>> target_of(one(1.0), one(True), one(10.0), discount=0.5).tolist()
    [1.0]
    """
    return reward + discount * jnp.where(terminated, 0.0, next_value)


def best_value(target_values: Values, own_values: Values | None = None) -> Rows:
    """The value of the best action, by the target network.

    Args:
        own_values: Of the network that is trained: the best action is then the one that it takes for the best, so that the
            same noise neither picks an action nor values it.

    Source: Deep Reinforcement Learning with Double Q-learning (arXiv:1509.06461), equation 4.
    """
    if own_values is None:
        return target_values.max(axis=-1)
    return value_of(target_values, own_values.argmax(axis=-1).astype(jnp.int32))


def value_of(values: Values, action: Int[Array, " batch"]) -> Rows:
    """The value of the action taken."""
    # By a mask, not a gather: its transpose is a product, where a gather's is a scatter.
    return jnp.where(action[:, None] == jnp.arange(values.shape[1])[None], values, 0.0).sum(axis=-1)


def duelling(advantage: Values, value: Rows) -> Values:
    """Values of actions as that of the state and what each action adds to it, beside the mean of all.

    Source: Dueling Network Architectures for Deep Reinforcement Learning (arXiv:1511.06581), equation 9.

    >>> duelling(jnp.array([[1.0, 3.0]]), jnp.array([10.0])).tolist()
    [[9.0, 11.0]]
    """
    return value[:, None] + advantage - advantage.mean(axis=-1, keepdims=True)


def error_of(value: Rows, target: Rows, *, form: ErrorForm) -> Rows:
    """Half the squared error, or Huber's: beyond a distance of 1, it grows linearly.

    >>> error_of(jnp.array([0.5, 3.0]), jnp.zeros(2), form="huber").tolist()
    [0.125, 2.5]
    """
    distance = jnp.abs(value - target)
    square = 0.5 * distance * distance
    return square if form == "squared" else jnp.where(distance <= 1.0, square, distance - 0.5)


def soft_value(values: Float[Array, "critic batch"], log_prob: Rows, temperature: Float[Array, ""]) -> Rows:
    """The value of a state whose action was drawn: the least of the critics' values, with the entropy's share.

    Source: Soft Actor-Critic Algorithms and Applications (arXiv:1812.05905), equation 3.
    """
    return values.min(axis=0) - temperature * log_prob


def temperature_loss(log_temperature: Float[Array, ""], log_prob: Rows, *, target_entropy: float) -> Rows:
    """What raises the temperature where the policy's entropy is below its target, and lowers it where it is above.

    Of the temperature's logarithm, as the authors' code and stable-baselines3 have it; equation 18 of arXiv:1812.05905 has the
    temperature itself in that place.
    """
    return -log_temperature * jax.lax.stop_gradient(log_prob + target_entropy)
