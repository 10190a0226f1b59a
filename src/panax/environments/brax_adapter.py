"""`Brax`: an environment of Brax, a physics simulator in JAX, which runs inside the compiled step."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from ..core.errors import RecipeError, suggest_name
from .environment import Action, Environment, EnvironmentStep, Observation, State
from .imports import Settings, import_library, sorted_pairs
from .spaces import Box


class BraxState(eqx.Module):
    """State of an episode.

    Attributes:
        inner: Brax's own state.
        time: Steps taken.
    """

    inner: State
    time: Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Brax(Environment):
    """One of Brax's environments, such as `ant`.

    Brax's wrappers, which count a time limit as `done`, are not used: the limit truncates an episode.

    Attributes:
        name: Name registered with Brax.
        options: Arguments of its class, such as `backend`.
        max_steps: Number of steps after which an episode is truncated.
    """

    name: str
    options: Settings = ()
    max_steps: int = 1000

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", sorted_pairs(self.options))
        if self.max_steps < 1:
            raise RecipeError(f"Brax.max_steps={self.max_steps}; expected 1 or more")
        known = getattr(import_library("brax.envs", "brax"), "_envs", None)
        if known is not None and self.name not in known:
            raise RecipeError(f"Brax.name={self.name!r}; {suggest_name(self.name, known)}")
        try:
            _ = self._environment
        except (TypeError, ValueError) as error:
            raise RecipeError(f"Brax.options={dict(self.options)} don't build {self.name}: {error}") from error
        if not isinstance(self._environment.observation_size, int | np.integer):
            raise RecipeError(
                f"Brax's {self.name} is observed by several arrays, {self._environment.observation_size}; expected one"
            )

    @functools.cached_property
    def _environment(self) -> Any:
        return import_library("brax.envs", "brax").get_environment(self.name, **dict(self.options))

    @property
    def observation_space(self) -> Box:
        return Box(low=-np.inf, high=np.inf, shape=(int(self._environment.observation_size),))

    @property
    def action_space(self) -> Box:
        return Box(low=-1.0, high=1.0, shape=(int(self._environment.action_size),))

    def reset(self, key: Key[Array, ""]) -> tuple[BraxState, Observation]:
        # Brax stores keys in its state: as words, since every leaf of a checkpoint is a numeric array.
        inner = self._environment.reset(jax.random.key_data(key))
        inner = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), inner)
        return BraxState(inner, jnp.int32(0)), inner.obs.astype(jnp.float32)

    def step(self, state: BraxState, action: Action, key: Key[Array, ""]) -> EnvironmentStep:
        # Brax writes into its state's dictionaries: pass it copies.
        after = self._environment.step(jax.tree.map(lambda leaf: leaf, state.inner), action)
        after = jax.tree.map(lambda new, old: jnp.asarray(new).astype(old.dtype), after, state.inner)
        time = state.time + 1
        seen, reward = after.obs.astype(jnp.float32), after.reward.astype(jnp.float32)
        return EnvironmentStep(BraxState(after, time), seen, reward, after.done > 0, time >= self.max_steps)
