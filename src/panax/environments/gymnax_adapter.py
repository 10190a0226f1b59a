"""`Gymnax`: an environment of gymnax, written in JAX, which runs inside the compiled step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from ..core.errors import RecipeError, suggest_name
from .canvas import BLUE, DARK, GREEN, RED, YELLOW
from .environment import Action, Environment, EnvironmentStep, Frame, Observation, State
from .imports import Settings, import_library, sorted_pairs
from .spaces import Box, Discrete, Space, normalize_bounds

_REMARK = " (gymnax is for jax below 0.12)"
_CELL = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gymnax(Environment):
    """One of gymnax's environments, such as `Breakout-MinAtar`.

    gymnax resets in its own step; here its parts are called separately, so that termination, truncation and
    the final observation are distinguished.

    Attributes:
        name: Name registered with gymnax.
        parameters: Parameters that differ from gymnax's defaults, such as `max_steps_in_episode`.
        options: Arguments of its class, such as `use_minimal_action_set`.
    """

    name: str
    parameters: Settings = ()
    options: Settings = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", sorted_pairs(self.parameters))
        object.__setattr__(self, "options", sorted_pairs(self.options))
        gymnax = import_library("gymnax", "gymnax", _REMARK)
        if self.name not in gymnax.registered_envs:
            raise RecipeError(f"Gymnax.name={self.name!r}; {suggest_name(self.name, gymnax.registered_envs)}")
        known = [field.name for field in dataclasses.fields(gymnax.make(self.name)[1])]
        for name in dict(self.parameters):
            if name not in known:
                raise RecipeError(
                    f"Gymnax.parameters has {name!r}, which {self.name} has not; {suggest_name(name, known)}"
                )
        try:
            _ = self._spaces
        except TypeError as error:
            raise RecipeError(f"Gymnax.options={dict(self.options)} don't build {self.name}: {error}") from error

    @functools.cached_property
    def _environment_and_parameters(self) -> tuple[Any, Any]:
        """Create gymnax's environment, and its parameters."""
        environment, parameters = import_library("gymnax", "gymnax", _REMARK).make(self.name, **dict(self.options))
        return environment, parameters.replace(**dict(self.parameters))

    @functools.cached_property
    def _spaces(self) -> tuple[Space, Space]:
        """Return the spaces of observations and of actions. gymnax computes their bounds: immediately, even
        while a step is being traced."""
        environment, parameters = self._environment_and_parameters
        with jax.ensure_compile_time_eval():
            return (
                _space(environment.observation_space(parameters), f"{self.name}'s observations"),
                _space(environment.action_space(parameters), f"{self.name}'s actions"),
            )

    @property
    def observation_space(self) -> Space:
        return self._spaces[0]

    @property
    def action_space(self) -> Space:
        return self._spaces[1]

    def reset(self, key: Key[Array, ""]) -> tuple[State, Observation]:
        environment, parameters = self._environment_and_parameters
        observation, state = environment.reset_env(key, parameters)
        return _strong(state), self._seen(observation)

    def step(self, state: State, action: Action, key: Key[Array, ""]) -> EnvironmentStep:
        environment, parameters = self._environment_and_parameters
        observation, after, reward, terminated, _ = environment.step_env(key, state, action, parameters)
        # A compiled loop carries the state: each leaf retains its dtype, even if gymnax counts in Python
        # numbers.
        after = jax.tree.map(lambda new, old: jnp.asarray(new).astype(old.dtype), after, state)
        truncated = environment.is_truncated(after, parameters)
        flags = (jnp.asarray(flag).astype(jnp.bool_) for flag in (terminated, truncated))
        return EnvironmentStep(after, self._seen(observation), jnp.asarray(reward).astype(jnp.float32), *flags)

    def render(self, state: State) -> Frame | None:
        """Render an observation that consists of image planes, as in MinAtar; None for other environments."""
        environment, parameters = self._environment_and_parameters
        seen = np.asarray(environment.get_obs(jax.tree.map(jnp.asarray, state), parameters, jax.random.key(0)))
        return _render_planes(seen) if seen.ndim == 3 else None

    @property
    def seconds_per_frame(self) -> float:
        return 0.1

    def _seen(self, observation: Any) -> Observation:
        return jnp.asarray(observation).astype(self.observation_space.abstract.dtype)


def _strong(state: State) -> State:
    """Convert arrays to dtypes that later operations don't promote."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), state)


def _space(theirs: Any, subject: str) -> Space:
    kind = type(theirs).__name__
    if kind == "Discrete":
        return Discrete(count=int(theirs.n))
    if kind != "Box":
        raise RecipeError(f"{subject} are a {kind}; expected a Box or a Discrete")
    shape = tuple(int(size) for size in theirs.shape)
    low, high = (np.broadcast_to(np.asarray(bound, np.float64), shape) for bound in (theirs.low, theirs.high))
    return Box(
        low=normalize_bounds(low, shape), high=normalize_bounds(high, shape), shape=shape, dtype=_dtype(theirs.dtype)
    )


def _dtype(dtype: Any) -> Any:
    name = np.dtype(dtype).name
    return {"int64": "int32", "float64": "float32"}.get(name, name)


def _render_planes(planes: np.ndarray) -> Frame:
    """Render (row, column, plane) as an image, with earlier planes above later ones."""
    colors = (BLUE, YELLOW, (150, 150, 150), RED, GREEN, DARK)
    frame = np.full((*planes.shape[:2], 3), 255, np.uint8)
    for plane in reversed(range(planes.shape[2])):
        frame[planes[..., plane] > 0] = colors[plane % len(colors)]
    return np.kron(frame, np.ones((_CELL, _CELL, 1), np.uint8))
