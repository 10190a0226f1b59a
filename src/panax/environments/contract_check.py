"""`check_environment`: finds violations of the environments' contract before training."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core.errors import RecipeError, describe_type
from ..core.params.axes import named_leaves
from .batch import EnvironmentBatch, EnvironmentState, Transition
from .environment import Environment, State
from .spaces import Box, Discrete, Space

_STEPS, _SIDE_BY_SIDE = 32, 4


def check_environment(environment: Environment, *, seed: int = 0, steps: int = _STEPS) -> None:
    """Trace an environment, then take some steps in it with actions drawn from its space.

    Args:
        steps: Number of steps; 0 only traces it, without compiling.

    Raises:
        RecipeError: A space, a shape, a dtype or a value is wrong; the message gives it and the expected
            one.
    """
    name = type(environment).__name__
    for role, space in (("observation", environment.observation_space), ("action", environment.action_space)):
        if not isinstance(space, Space):
            raise RecipeError(
                f"{name}.{role}_space is {describe_type(space)}; expected a Box or a Discrete of panax.environments"
            )
    _check_shapes(environment, name)
    if steps:
        _check_values(environment, name, seed, steps)


def check_actions(space: Space, actions: np.ndarray | jax.Array, name: str = "the environment") -> None:
    """Check a batch of actions, with one leading axis, against their space: for code that steps an
    environment from the host.

    Raises:
        RecipeError: Their shape, their dtype, or one of them is not in the space; the message gives the
            first.
    """
    array, expected = np.asarray(actions), space.abstract
    if array.shape[1:] != expected.shape or array.dtype.kind != np.dtype(expected.dtype).kind:
        raise RecipeError(
            f"actions for {name} have the shape {array.shape} and dtype {array.dtype}; expected "
            f"{(array.shape[:1] or ('batch',)) + expected.shape} and {expected.dtype}, of {space}"
        )
    within = np.asarray(jax.vmap(space.contains)(jnp.asarray(array)))
    if not within.all():
        first = int(np.argmin(within))
        raise RecipeError(f"action {array[first]} of environment {first} is out of range for {name}; expected {space}")


def _check_shapes(environment: Environment, name: str) -> None:
    """Check the shapes of the traced functions, without running them."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    try:
        state, observation = jax.eval_shape(environment.reset, key)
    except RecipeError:
        raise
    except (TypeError, ValueError) as error:
        raise RecipeError(f"{name}.reset(key) can't be traced: {error}") from error
    _check_leaf(f"{name}.reset: observation", observation, environment.observation_space.abstract)
    try:
        step = jax.eval_shape(environment.step, state, environment.action_space.abstract, key)
    except (TypeError, ValueError, IndexError) as error:
        action = environment.action_space
        raise RecipeError(
            f"{name}.step(state, action, key) can't be traced with an action of {action}: {error}"
        ) from error
    if len(step) != 5:
        raise RecipeError(
            f"{name}.step returned {len(step)} values; expected "
            "EnvironmentStep(state, observation, reward, terminated, truncated)"
        )
    after, observation, reward, terminated, truncated = step
    _check_state(name, state, after)
    _check_leaf(f"{name}.step: observation", observation, environment.observation_space.abstract)
    _check_leaf(f"{name}.step: reward", reward, jax.ShapeDtypeStruct((), jnp.float32))
    for role, flag in (("terminated", terminated), ("truncated", truncated)):
        _check_leaf(f"{name}.step: {role}", flag, jax.ShapeDtypeStruct((), jnp.bool_))


def _check_state(name: str, before: State, after: State) -> None:
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise RecipeError(
            f"{name}.step changes the state's structure from {jax.tree.structure(before)} to {jax.tree.structure(after)}; "
            f"expected the same one, as a compiled loop carries it"
        )
    for (path, old), new in zip(named_leaves(before).items(), named_leaves(after).values()):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise RecipeError(
                f"{name}.step changes the state's leaf {path or 'state'} from {_shown(old)} to {_shown(new)}; expected the same "
                f"shape and dtype, as a compiled loop carries it"
            )


def _check_leaf(what: str, got: Any, expected: jax.ShapeDtypeStruct) -> None:
    shape, dtype = getattr(got, "shape", None), getattr(got, "dtype", None)
    if shape != expected.shape or dtype != expected.dtype:
        came = _shown(got) if shape is not None else f"{describe_type(got)}"
        raise RecipeError(f"{what} is {came}; expected {_shown(expected)}")


def _shown(leaf: Any) -> str:
    return f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _check_values(environment: Environment, name: str, seed: int, steps: int) -> None:
    """Check the values of some real steps."""
    batch, index = EnvironmentBatch(environment), jnp.arange(_SIDE_BY_SIDE)
    key = jax.random.key(seed)

    def step(ongoing: EnvironmentState, number: jax.Array) -> tuple[EnvironmentState, tuple[jax.Array, Transition]]:
        keys = jax.random.split(jax.random.fold_in(key, number), 2)
        action = jax.vmap(environment.action_space.sample)(jax.random.split(keys[0], _SIDE_BY_SIDE))
        transition = batch.step(ongoing, action, keys[1], index)
        return transition.environment_state, (action, transition)

    first = jax.jit(batch.reset)(key, index)
    actions, after = jax.jit(lambda ongoing: jax.lax.scan(step, ongoing, jnp.arange(steps))[1])(first)
    _check_observations(f"{name}.reset", environment.observation_space, first.observation[None], None)
    rewards = np.asarray(after.reward)
    if not np.isfinite(rewards).all():
        number, place = np.argwhere(~np.isfinite(rewards))[0]
        raise RecipeError(
            f"{name}.step gave the reward {rewards[number, place]} in step {number + 1}, for the action "
            f"{actions[number, place]}; expected a finite number"
        )
    _check_observations(f"{name}.step", environment.observation_space, after.final_observation, actions)


def _check_observations(what: str, space: Space, observations: jax.Array, actions: jax.Array | None) -> None:
    """Check observations, with leading axes of steps and of environments, against their space."""
    seen = np.asarray(observations)
    within = np.asarray(jax.vmap(jax.vmap(space.contains))(observations))
    if within.all():
        return
    number, place = np.argwhere(~within)[0]
    bad = seen[number, place]
    when = "" if actions is None else f" in step {number + 1}, for the action {actions[number, place]}"
    if bad.dtype.kind == "f" and np.isnan(bad).any():
        raise RecipeError(f"{what} returned an observation with NaN{when}; expected numbers of {space}")
    raise RecipeError(f"{what} gave the observation {_short(bad)}{when}; {_outside(bad, space)}")


def _outside(value: np.ndarray, space: Space) -> str:
    """Describe the first element out of range, and the range."""
    if isinstance(space, Discrete):
        return f"expected 0 to {space.count - 1}"
    assert isinstance(space, Box)
    low, high = (np.broadcast_to(bound, space.shape) for bound in (space.lower, space.upper))
    place = tuple(int(each) for each in np.argwhere((value < low) | (value > high))[0])
    where = f"element {list(place)} is {value[place]}" if place else f"it is {value}"
    return f"{where}, outside its space's [{low[place]:g}, {high[place]:g}]"


def _short(value: np.ndarray) -> str:
    return np.array2string(value, threshold=8, edgeitems=3, precision=4)
