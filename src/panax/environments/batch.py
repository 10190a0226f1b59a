"""`EnvironmentBatch`: many environments side by side, each reset by itself when its episode ends."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Num

from .environment import Action, Environment, State


class EnvironmentState(eqx.Module):
    """Episodes under way; every leaf has the leading axis `batch`.

    Attributes:
        state: Of the environments.
        observation: What the policy is to act on next; after an episode's end, the first one of the next episode.
        episode_return: Sum of the rewards of the episode so far, not discounted.
        episode_length: Steps of the episode so far.
    """

    state: State
    observation: Num[Array, "batch ..."] | Bool[Array, "batch ..."]
    episode_return: Float[Array, " batch"]
    episode_length: Int[Array, " batch"]


class Transition(NamedTuple):
    """What one step of a batch yields; every leaf has the leading axis `batch`.

    Attributes:
        ongoing: After the step and the resets that followed.
        final_observation: What the step led to, before any reset: bootstrap from this one.
        reward: Of the step.
        terminated: The episode ended, and the value of `final_observation` is 0.
        truncated: The episode was cut; the value of `final_observation` is not 0 unless it has terminated too.
        episode_return: Sum of the rewards of the episode, this step's included; final where the episode ended.
        episode_length: Steps of the episode, this one included.
    """

    environment_state: EnvironmentState
    final_observation: Num[Array, "batch ..."] | Bool[Array, "batch ..."]
    reward: Float[Array, " batch"]
    terminated: Bool[Array, " batch"]
    truncated: Bool[Array, " batch"]
    episode_return: Float[Array, " batch"]
    episode_length: Int[Array, " batch"]

    @property
    def ended(self) -> Bool[Array, "*steps batch"]:
        """Whether an episode ended, in either way."""
        return self.terminated | self.truncated


@dataclasses.dataclass(frozen=True)
class EnvironmentBatch:
    """`environment` over a leading batch axis, with automatic reset.

    What is drawn is a function of the key and of each environment's index in the whole batch: a shard that steps its own part
    of the environments, with their indices, draws what one device would.

    >>> from panax.environments import CartPole
    >>> batch = EnvironmentBatch(CartPole())
    >>> ongoing = batch.reset(jax.random.key(0), jnp.arange(2))
    >>> batch.step(ongoing, jnp.array([0, 1]), jax.random.key(1), jnp.arange(2)).reward.tolist()
    [1.0, 1.0]
    """

    environment: Environment

    def reset(self, key: Key[Array, ""], index: Int[Array, " batch"]) -> EnvironmentState:
        """Begin an episode in each environment.

        Args:
            key: Of the run, or of an evaluation.
            index: Of each environment in the whole batch.
        """
        state, observation = self.environment.reset_all(row_keys(key, index))
        zeros = jnp.zeros(index.shape, jnp.float32)
        return EnvironmentState(state, observation, zeros, zeros.astype(jnp.int32))

    def step(
        self, ongoing: EnvironmentState, action: Action, key: Key[Array, ""], index: Int[Array, " batch"]
    ) -> Transition:
        """Take an action in each environment, and begin another episode where one ended.

        Args:
            action: One of `action_space` for each environment.
            key: Another one for every step.
            index: Of each environment in the whole batch.
        """
        return self.step_with_keys(ongoing, action, row_keys(key, index))

    def step_with_keys(self, ongoing: EnvironmentState, action: Action, keys: Key[Array, " batch"]) -> Transition:
        """As `step`, with a key for each environment."""
        stepped, state, observation = self.environment.step_all(ongoing.state, ongoing.observation, action, keys)
        ended = stepped.terminated | stepped.truncated
        total, length = ongoing.episode_return + stepped.reward, ongoing.episode_length + 1
        zero = jnp.zeros_like(total)
        after = EnvironmentState(
            state, observation, jnp.where(ended, zero, total), jnp.where(ended, zero.astype(jnp.int32), length)
        )
        return Transition(
            after, stepped.observation, stepped.reward, stepped.terminated, stepped.truncated, total, length
        )


def row_keys(key: Key[Array, ""], index: Int[Array, " batch"]) -> Key[Array, " batch"]:
    """A key for each row by its number in the whole batch."""
    return jax.vmap(lambda each: jax.random.fold_in(key, each))(index)


def step_keys(
    key: Key[Array, ""], index: Int[Array, " batch"], steps: int
) -> tuple[Key[Array, "time batch"], Key[Array, "time batch"]]:
    """For each of several steps a key for each row to act with, and one to be moved with.

    All at once: in a loop over steps their few numbers would cost more than small networks do.
    """

    def of_step(number: Int[Array, ""]) -> tuple[Key[Array, " batch"], Key[Array, " batch"]]:
        act_key, move_key = jax.random.split(jax.random.fold_in(key, number))
        return row_keys(act_key, index), row_keys(move_key, index)

    return jax.vmap(of_step)(jnp.arange(steps))
