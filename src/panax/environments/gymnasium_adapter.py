"""`Gymnasium`: environments of gymnasium, in Python or C++, stepped by processes of the host while the
compiled step waits."""

import collections
import contextlib
import dataclasses
import functools
import os
import threading
import zlib
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Key, UInt32

from ..compiling.callbacks import capture_callback_errors
from ..core.errors import RecipeError
from .environment import Action, Environment, EnvironmentStep, Observation, State
from .host_pool import MAX_PROCESSES, HostPool
from .host_values import NARROW_DTYPES
from .imports import Settings, import_library, sorted_pairs
from .spaces import Box, Discrete, Space, normalize_bounds

_MOST_POOLS = 2
"""Number of pools that one environment's settings leave open: one for training, and one for evaluation."""


class HostState(eqx.Module):
    """A device's reference to environments on the host.

    Attributes:
        session: Id of the environments started by one call of `reset_all`.
        steps: Number of steps so far, the same in all environments.
    """

    session: UInt32[Array, "..."]
    steps: Int[Array, "..."]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gymnasium(Environment):
    """One of gymnasium's environments, stepped by processes of this host.

    It trains like any other environment, in jobs of one process, but slower: the step waits for the host. It
    can't resume exactly: an episode's state is in a process, and not in a checkpoint. If a run resumes,
    returns to an earlier step or repeats one, the running episodes are truncated, as by a time limit, and
    others begin.

    Attributes:
        name: Name registered with gymnasium; `module:name` imports a module first.
        settings: Arguments of gymnasium's `make`.
        processes: Number of processes that step a batch of environments; None for the number of cores that
            this process may use.
        timeout_seconds: Time limit for a step of all environments.
    """

    name: str
    settings: Settings = ()
    processes: int | None = None
    timeout_seconds: float = 60.0

    lives_on_host = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", sorted_pairs(self.settings))
        import_library("gymnasium", "gymnasium")
        if self.processes is not None and not 1 <= self.processes <= MAX_PROCESSES:
            raise RecipeError(f"Gymnasium.processes={self.processes}; expected 1 to {MAX_PROCESSES}")
        if self.timeout_seconds <= 0:
            raise RecipeError(f"Gymnasium.timeout_seconds={self.timeout_seconds}; expected more than 0")
        _ = self._spaces

    @functools.cached_property
    def _spaces(self) -> tuple[Space, Space, str]:
        """Return the spaces of observations and of actions, and the error of a first step, as reported by a
        temporary process."""
        with contextlib.closing(self._pool(1)) as pool:
            fault = pool.fault()
        observation, action = (
            _space(pool.spaces[role], f"{self.name}'s {role}s") for role in ("observation", "action")
        )
        return observation, action, fault

    @functools.cached_property
    def _sessions(self) -> "_Sessions":
        return _Sessions(self._pool)

    def _pool(self, count: int) -> HostPool:
        processes = self.processes or len(os.sched_getaffinity(0))
        return HostPool(
            self.name, count, processes=processes, settings=dict(self.settings), timeout_seconds=self.timeout_seconds
        )

    @property
    def observation_space(self) -> Space:
        return self._spaces[0]

    @property
    def action_space(self) -> Space:
        return self._spaces[1]

    def close(self) -> None:
        """End all processes, which otherwise end with the program."""
        self._sessions.close()

    def reset(self, key: Key[Array, ""]) -> tuple[State, Observation]:
        state, observation = self.reset_all(key[None])
        return jax.tree.map(lambda leaf: leaf[0], (state, observation))

    def step(self, state: State, action: Action, key: Key[Array, ""]) -> EnvironmentStep:
        observation = jnp.zeros(self.observation_space.abstract.shape, self.observation_space.abstract.dtype)
        batch_state, before, act = jax.tree.map(lambda leaf: leaf[None], (state, observation, action))
        stepped, after, _ = self.step_all(batch_state, before, act, key[None])
        return jax.tree.map(lambda leaf: leaf[0], stepped._replace(state=after))

    def reset_all(self, keys: Key[Array, " batch"]) -> tuple[HostState, Observation]:
        if fault := self._spaces[2]:
            # Before a step is compiled: an error of a callback would be one of the runtime's.
            raise RecipeError(f"Gymnasium(name={self.name!r}) can't be trained in: {fault}")
        if jax.process_count() > 1:
            # The error of a callback only reaches the process that called it, and all wait for each other.
            raise RecipeError(
                f"Gymnasium(name={self.name!r}) is stepped by one host, and this job has {jax.process_count()} processes, which "
                f"would wait forever for an environment that breaks; run it in one process, or use an environment "
                f"written in JAX"
            )
        session, observation = io_callback(
            self._sessions.begin,
            (jax.ShapeDtypeStruct((), jnp.uint32), self._batch_observation(keys.shape[0])),
            _seeds(keys),
        )
        count = keys.shape[0]
        return HostState(jnp.broadcast_to(session, (count,)), jnp.zeros(count, jnp.int32)), observation

    def step_all(
        self, state: HostState, observation: Observation, action: Action, keys: Key[Array, " batch"]
    ) -> tuple[EnvironmentStep, HostState, Observation]:
        count = keys.shape[0]
        batch_observation, flags = self._batch_observation(count), jax.ShapeDtypeStruct((count,), jnp.bool_)
        # Each step receives the session that the previous one returned: that data dependency orders them.
        rewards = jax.ShapeDtypeStruct((count,), jnp.float32)
        answer = (jax.ShapeDtypeStruct((), jnp.uint32), batch_observation, batch_observation, rewards, flags, flags)
        session, led_to, current, reward, terminated, truncated = io_callback(
            self._sessions.step, answer, state.session[0], state.steps[0], observation, action, _seeds(keys)
        )
        after = HostState(jnp.broadcast_to(session, (count,)), state.steps + 1)
        return EnvironmentStep(after, led_to, reward, terminated, truncated), after, current

    def _batch_observation(self, count: int) -> jax.ShapeDtypeStruct:
        one = self.observation_space.abstract
        return jax.ShapeDtypeStruct((count, *one.shape), one.dtype)


class _Sessions:
    """Open pools by session; the most recently used one is last."""

    def __init__(self, make: Any):
        self._make = make
        self._pools: collections.OrderedDict[int, tuple[HostPool, int]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def begin(self, seeds: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Begin episodes with these seeds; return the session, by which `step` finds them, and the
        observations."""
        seed_array = np.asarray(seeds)
        session = zlib.crc32(seed_array.tobytes())
        with capture_callback_errors(), self._lock:
            pool = self._free_pool(session, len(seed_array))
            observation = pool.reset(seed_array.tolist())
            self._pools[session] = (pool, 0)
        return np.asarray(session, np.uint32), _as_device(observation)

    def step(
        self, session: ArrayLike, steps: ArrayLike, observation: ArrayLike, action: ArrayLike, seeds: ArrayLike
    ) -> tuple[np.ndarray, ...]:
        number, num_steps, seed_array = int(np.asarray(session)), int(np.asarray(steps)), np.asarray(seeds)
        with capture_callback_errors(), self._lock:
            pool, steps_taken = self._pools.get(number, (None, -1))
            if pool is not None and steps_taken == num_steps:
                stepped = pool.step(np.asarray(action), seed_array.tolist())
                self._pools[number] = (pool, steps_taken + 1)
                self._pools.move_to_end(number)
                return np.asarray(number, np.uint32), *map(_as_device, stepped)
            # The run has resumed, or returned to an earlier step: those episodes no longer exist.
            pool = self._free_pool(number, len(seed_array))
            first_observation = _as_device(pool.reset(seed_array.tolist()))
            self._pools[number] = (pool, num_steps + 1)
        rewards, truncated = np.zeros(len(seed_array), np.float32), np.ones(len(seed_array), bool)
        return np.asarray(number, np.uint32), np.asarray(observation), first_observation, rewards, ~truncated, truncated

    def close(self) -> None:
        with self._lock:
            for pool, _ in self._pools.values():
                pool.close()
            self._pools.clear()

    def _free_pool(self, session: int, count: int) -> HostPool:
        """Return a pool for a session: its own, the least recently used one, or a new one."""
        session_pool = self._pools.pop(session, None)
        oldest = (
            self._pools.popitem(last=False)[1] if session_pool is None and len(self._pools) >= _MOST_POOLS else None
        )
        for candidate in (session_pool, oldest):
            if candidate is not None and candidate[0].count == count and not candidate[0].closed:
                return candidate[0]
            if candidate is not None:
                candidate[0].close()
        return self._make(count)


def _seeds(keys: Key[Array, " batch"]) -> UInt32[Array, " batch"]:
    return jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys) >> 1


def _as_device(array: np.ndarray) -> np.ndarray:
    return array.astype(NARROW_DTYPES.get(array.dtype.name, array.dtype.name), copy=False)


def _space(description: Mapping[str, Any], subject: str) -> Space:
    if description["kind"] == "Discrete" and description["start"] == 0:
        return Discrete(count=description["count"])
    if description["kind"] != "Box":
        raise RecipeError(f"{subject} are a {description['kind']}; expected a Box, or a Discrete that counts from 0")
    shape, low, high = tuple(description["shape"]), description["low"], description["high"]
    dtype: Any = NARROW_DTYPES.get(description["dtype"], description["dtype"])
    return Box(low=normalize_bounds(low, shape), high=normalize_bounds(high, shape), shape=shape, dtype=dtype)
