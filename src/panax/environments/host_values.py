"""What gymnasium's environments take and return, as the arrays that Panax expects: cast where no value changes, else refused.

Imported by the processes that step environments, so it imports neither jax nor anything of Panax.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

NARROW_DTYPES = {"float64": "float32", "int64": "int32"}
"""Types of gymnasium's spaces that a device holds in 32 bits."""


def to_host_action(space: Any, action: Any) -> Any:
    """An action of the environment's own space and dtype: a Python integer for `Discrete`, an array for a `Box`.

    A bound of 64 bits may be a rounding step inside of the nearest value of 32 bits: that action is moved to the bound.
    """
    given = np.asarray(action)
    if type(space).__name__ == "Discrete":
        return int(given)
    wide = given.astype(space.dtype)
    if given.dtype == wide.dtype:
        return wide
    inside = np.clip(wide, space.low, space.high).astype(space.dtype)
    return np.where(inside.astype(given.dtype) == given, inside, wide)


def first_observation(environment: Any, seed: int) -> np.ndarray:
    """What the environment returns at the beginning of an episode.

    Raises:
        TypeError: It has the form of gym before 0.26, or something else.
    """
    given = environment.reset(seed=seed)
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)):
        what = f"a tuple of {len(given)}" if isinstance(given, tuple) else f"a {type(given).__name__}"
        raise TypeError(
            f"reset returned {what}; expected (observation, info) with a dict as info: the environment has the form of gym "
            f"before 0.26; return observation, {{}} or wrap it with shimmy's GymV21CompatibilityV0"
        )
    return to_device_observation(environment.observation_space, given[0], "reset")


def to_device_observation(space: Any, given: Any, method: str = "step") -> np.ndarray:
    """An observation in the dtype that a device holds, in memory that nothing else writes to.

    Raises:
        TypeError: Its shape is another one, or its values don't fit the dtype of the space.
    """
    declared = f"its space declares {space.dtype.name} of shape {tuple(space.shape)}"
    array = np.asarray(given)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{method} returned an observation of {array.dtype} ({type(given).__name__}); {declared}")
    if array.shape != tuple(space.shape):
        raise TypeError(f"{method} returned an observation of shape {array.shape}; {declared}")
    held = np.dtype(NARROW_DTYPES.get(space.dtype.name, space.dtype.name))
    with np.errstate(invalid="ignore", over="ignore"):
        cast = array.astype(held)
    wrong = np.zeros(array.shape, np.bool_)
    if held.kind == "f":
        wrong = np.asarray(np.isinf(cast) & np.isfinite(array))
    if held.kind != "f":
        # Whole numbers, and fractions that are whole, if they fit: compared as floats, since a cast may turn a sign.
        wrong = np.asarray(cast.astype(np.float64) != array.astype(np.float64))
    if wrong.any():
        value = array[wrong][0]
        held_in = f", which Panax holds in {held.name}" if held != space.dtype else ""
        raise TypeError(f"{method} returned an observation with {value} ({array.dtype.name}); {declared}{held_in}")
    return cast


def to_float_reward(given: Any) -> np.float32:
    """A reward as one number; an array of one element is one.

    Raises:
        TypeError: It is something else.
    """
    array = np.asarray(given)
    if array.size != 1 or array.dtype.kind not in "biuf":
        what = f"{array.dtype} of shape {array.shape}" if array.dtype.kind in "biuf" else f"a {type(given).__name__}"
        raise TypeError(f"step returned a reward that is {what}; expected one number")
    return np.float32(array.reshape(()))


def to_bool_flag(name: str, given: Any) -> bool:
    """A flag as a bool; 0 and 1, and an array of one element, are flags too.

    Raises:
        TypeError: It is something else.
    """
    array = np.asarray(given)
    if array.size != 1 or array.dtype.kind not in "biuf" or array.reshape(()) not in (0, 1):
        raise TypeError(f"step returned {name}={given!r}; expected True or False")
    return bool(array.reshape(()))
