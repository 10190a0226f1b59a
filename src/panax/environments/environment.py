"""`Environment`: one environment as pure functions, without a batch axis, traced into the step that learns
from it."""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key, UInt8

from ..core.validation import Validated
from .spaces import Space

State = Any
"""Any pytree of arrays, including the step count of an environment's own time limit."""

Observation = jax.Array
Action = jax.Array
"""An action of one environment, in the form of its action space."""

Frame = UInt8[np.ndarray, "height width 3"]
"""One picture: 8 bits for each of red, green and blue."""


_RESET = 0x7E5E7
"""Folded into a step's key for the reset that may follow, so that they share no random bits."""


class EnvironmentStep(NamedTuple):
    """Result of one step of an environment.

    Attributes:
        state: State after the step, even if the episode has ended.
        observation: Observation of that state.
        reward: Reward, float32.
        terminated: The episode ended in a terminal state, with a value of 0.
        truncated: The episode was cut off, for example by a time limit; the value of its last state is not 0.
            If both flags are set, it has terminated.
    """

    state: State
    observation: Observation
    reward: Float[Array, ""]
    terminated: Bool[Array, ""]
    truncated: Bool[Array, ""]


class Environment(Validated, abc.ABC):
    """Base class of environments: a frozen keyword-only dataclass of settings with pure functions, for `jit`
    and `vmap`.

    `step` never resets: `EnvironmentBatch` does. `check_environment` finds violations of this contract.
    """

    lives_on_host: bool = False
    """True if its state is on the host: it is then stepped for one run in one process."""

    @property
    @abc.abstractmethod
    def observation_space(self) -> Space:
        """Return the space of observations."""

    @property
    @abc.abstractmethod
    def action_space(self) -> Space:
        """Return the space of actions."""

    @abc.abstractmethod
    def reset(self, key: Key[Array, ""]) -> tuple[State, Observation]:
        """Draw the first state of an episode, with its observation."""

    @abc.abstractmethod
    def step(self, state: State, action: Action, key: Key[Array, ""]) -> EnvironmentStep:
        """Compute the state that follows `state` after `action`. All randomness comes from `key`.

        Args:
            action: An element of `action_space`; otherwise the resulting state is meaningless.
        """

    def reset_all(self, keys: Key[Array, " batch"]) -> tuple[State, Observation]:
        """Call `reset` for each environment of a batch. Override it if environments are stepped together, such as
        on the host."""
        return jax.vmap(self.reset)(keys)

    def step_all(
        self, state: State, observation: Observation, action: Action, keys: Key[Array, " batch"]
    ) -> tuple[EnvironmentStep, State, Observation]:
        """Call `step` for each environment of a batch, and `reset` where an episode ended; return the step, and
        the states and observations after the resets.

        Args:
            observation: Observation that the action was based on.
        """
        stepped = jax.vmap(self.step)(state, action, keys)
        first = jax.vmap(self.reset)(jax.vmap(lambda key: jax.random.fold_in(key, _RESET))(keys))
        ended = stepped.terminated | stepped.truncated

        def where_ended(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(ended.reshape(ended.shape + (1,) * (old.ndim - 1)), new, old)

        return stepped, *jax.tree.map(where_ended, first, (stepped.state, stepped.observation))

    def render(self, state: State) -> Frame | None:
        """Draw a picture of a state, on the host from NumPy arrays; None, the default, if there is none."""
        return None

    @property
    def seconds_per_frame(self) -> float:
        """Return how long a film of an episode shows each step."""
        return 0.05
