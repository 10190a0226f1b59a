"""`EnvironmentBatch`: many environments side by side, each reset automatically when its episode ends."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Num

from .environment import Action, Environment, State


class EnvironmentState(eqx.Module):
    """Running episodes; every leaf has the leading axis `batch`.

    Attributes:
        state: States of the environments.
        observation: Next input of the policy; after an episode's end, the first one of the next episode.
        episode_return: Undiscounted sum of the rewards of the episode so far.
        episode_length: Steps of the episode so far.
    """

    state: State
    observation: Num[Array, "batch ..."] | Bool[Array, "batch ..."]
    episode_return: Float[Array, " batch"]
    episode_length: Int[Array, " batch"]


class Transition(NamedTuple):
    """Result of one step of a batch; every leaf has the leading axis `batch`.

    Attributes:
        environment_state: State after the step and the resets that followed.
        final_observation: Observation after the step, before any reset: bootstrap from this one.
        reward: Reward of the step.
        terminated: The episode ended, and the value of `final_observation` is 0.
        truncated: The episode was truncated; the value of `final_observation` is not 0 unless it has
            terminated too.
        episode_return: Sum of the rewards of the episode, including this step's; final if the episode ended.
        episode_length: Steps of the episode, including this one.
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
        """Return True where an episode ended, in either way."""
        return self.terminated | self.truncated


@dataclasses.dataclass(frozen=True)
class EnvironmentBatch:
    """An environment with a leading batch axis and automatic reset.

    Random numbers are a function of the key and of each environment's index in the global batch: a shard of the
    environments, with their indices, draws the same numbers as a single device.

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
            key: Key of the run, or of an evaluation.
            index: Index of each environment in the global batch.
        """
        state, observation = self.environment.reset_all(row_keys(key, index))
        zeros = jnp.zeros(index.shape, jnp.float32)
        return EnvironmentState(state, observation, zeros, zeros.astype(jnp.int32))

    def step(
        self, ongoing: EnvironmentState, action: Action, key: Key[Array, ""], index: Int[Array, " batch"]
    ) -> Transition:
        """Take an action in each environment, and begin another episode wherever one ended.

        Args:
            action: An element of `action_space` for each environment.
            key: Key, different for every step.
            index: Index of each environment in the global batch.
        """
        return self.step_with_keys(ongoing, action, row_keys(key, index))

    def step_with_keys(self, ongoing: EnvironmentState, action: Action, keys: Key[Array, " batch"]) -> Transition:
        """Take a step with a key for each environment; otherwise like `step`."""
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
    """Derive a key for each row from its index in the global batch."""
    return jax.vmap(lambda each: jax.random.fold_in(key, each))(index)


def step_keys(
    key: Key[Array, ""], index: Int[Array, " batch"], steps: int
) -> tuple[Key[Array, "time batch"], Key[Array, "time batch"]]:
    """Derive, for each of several steps and each row, a key for the action and one for the environment's
    step.

    All keys are derived at once: in a loop over steps, deriving these few values would cost more than a small
    network.
    """

    def of_step(number: Int[Array, ""]) -> tuple[Key[Array, " batch"], Key[Array, " batch"]]:
        act_key, move_key = jax.random.split(jax.random.fold_in(key, number))
        return row_keys(act_key, index), row_keys(move_key, index)

    return jax.vmap(of_step)(jnp.arange(steps))
