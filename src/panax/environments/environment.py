"""`Environment`: one environment as pure functions, without a batch axis, that are traced into the step that learns from it."""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key, UInt8

from ..core.validation import Validated
from .spaces import Space

State = Any
"""Any pytree of arrays; what an environment's own time limit counts is in it."""

Observation = jax.Array
Action = jax.Array

Frame = UInt8[np.ndarray, "height width 3"]
"""One picture: 8 bits for each of red, green and blue."""


_RESET = 0x7E5E7
"""Folded into a step's key for the reset that may follow, which so shares no bits with the step."""


class EnvironmentStep(NamedTuple):
    """What one step of an environment yields.

    Attributes:
        state: After the step, also where the episode has ended.
        observation: Of that state.
        reward: float32.
        terminated: The episode ended in a state from which nothing more can be earned: its value is 0.
        truncated: The episode was cut, as by a time limit; the value of its last state is not 0. Both may be true: then it has
            terminated.
    """

    state: State
    observation: Observation
    reward: Float[Array, ""]
    terminated: Bool[Array, ""]
    truncated: Bool[Array, ""]


class Environment(Validated, abc.ABC):
    """The base of environments: a frozen keyword-only dataclass of settings with pure functions, for `jit` and `vmap`.

    `step` never resets: `EnvironmentBatch` does. `check_environment` finds what breaks this contract.
    """

    lives_on_host: bool = False
    """Whether its state is on the host: it is then stepped for one run in one process."""

    @property
    @abc.abstractmethod
    def observation_space(self) -> Space:
        """What observations are."""

    @property
    @abc.abstractmethod
    def action_space(self) -> Space:
        """What actions are."""

    @abc.abstractmethod
    def reset(self, key: Key[Array, ""]) -> tuple[State, Observation]:
        """Draw the first state of an episode, with its observation."""

    @abc.abstractmethod
    def step(self, state: State, action: Action, key: Key[Array, ""]) -> EnvironmentStep:
        """The state that follows `state` where `action` is taken. What is drawn, is drawn from `key`.

        Args:
            action: Of `action_space`; another one gives a state that means nothing.
        """

    def reset_all(self, keys: Key[Array, " batch"]) -> tuple[State, Observation]:
        """`reset` for each of a batch. Of environments that are stepped all at once, as those of the host."""
        return jax.vmap(self.reset)(keys)

    def step_all(
        self, state: State, observation: Observation, action: Action, keys: Key[Array, " batch"]
    ) -> tuple[EnvironmentStep, State, Observation]:
        """`step` for each of a batch, and `reset` where an episode ended: the step, then states and observations after that.

        Args:
            observation: What the action was taken on.
        """
        stepped = jax.vmap(self.step)(state, action, keys)
        first = jax.vmap(self.reset)(jax.vmap(lambda key: jax.random.fold_in(key, _RESET))(keys))
        ended = stepped.terminated | stepped.truncated

        def where_ended(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(ended.reshape(ended.shape + (1,) * (old.ndim - 1)), new, old)

        return stepped, *jax.tree.map(where_ended, first, (stepped.state, stepped.observation))

    def render(self, state: State) -> Frame | None:
        """A picture of a state, drawn on the host from NumPy arrays; None, the default, where there is none."""
        return None

    @property
    def seconds_per_frame(self) -> float:
        """How long a film of an episode shows each step."""
        return 0.05
