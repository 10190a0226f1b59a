"""Conversion of gymnasium's inputs and outputs to the arrays that Panax expects: cast if no value changes,
else rejected.

Imported by the processes that step environments, so it imports neither jax nor other modules of Panax.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

NARROW_DTYPES = {"float64": "float32", "int64": "int32"}
"""Dtypes of gymnasium's spaces that devices represent in 32 bits."""


def to_host_action(space: Any, action: Any) -> Any:
    """Convert an action to the environment's space and dtype: a Python integer for `Discrete`, an array for a
    `Box`.

    A 64-bit bound may be a rounding step inside the nearest 32-bit value: that action is moved to the bound.
    """
    array = np.asarray(action)
    if type(space).__name__ == "Discrete":
        return int(array)
    wide = array.astype(space.dtype)
    if array.dtype == wide.dtype:
        return wide
    inside = np.clip(wide, space.low, space.high).astype(space.dtype)
    return np.where(inside.astype(array.dtype) == array, inside, wide)


def first_observation(environment: Any, seed: int) -> np.ndarray:
    """Reset an environment; return its first observation.

    Raises:
        TypeError: The result has the form of gym before 0.26, or is invalid.
    """
    result = environment.reset(seed=seed)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
        description = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise TypeError(
            f"reset returned {description}; expected (observation, info) with a dict as info: the environment has "
            f"the form of gym "
            f"before 0.26; return observation, {{}} or wrap it with shimmy's GymV21CompatibilityV0"
        )
    return to_device_observation(environment.observation_space, result[0], "reset")


def to_device_observation(space: Any, observation: Any, method: str = "step") -> np.ndarray:
    """Convert an observation to the device's dtype, in newly allocated memory.

    Raises:
        TypeError: The observation's shape is wrong, or its values don't fit the dtype of the space.
    """
    declared = f"its space declares {space.dtype.name} of shape {tuple(space.shape)}"
    array = np.asarray(observation)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{method} returned an observation of {array.dtype} ({type(observation).__name__}); {declared}")
    if array.shape != tuple(space.shape):
        raise TypeError(f"{method} returned an observation of shape {array.shape}; {declared}")
    device_dtype = np.dtype(NARROW_DTYPES.get(space.dtype.name, space.dtype.name))
    with np.errstate(invalid="ignore", over="ignore"):
        cast = array.astype(device_dtype)
    wrong = np.zeros(array.shape, np.bool_)
    if device_dtype.kind == "f":
        wrong = np.asarray(np.isinf(cast) & np.isfinite(array))
    if device_dtype.kind != "f":
        # Whole numbers, and floats with whole values, if they fit: compared as floats, since a cast may
        # change a sign.
        wrong = np.asarray(cast.astype(np.float64) != array.astype(np.float64))
    if wrong.any():
        value = array[wrong][0]
        narrowed = f", which Panax holds in {device_dtype.name}" if device_dtype != space.dtype else ""
        raise TypeError(f"{method} returned an observation with {value} ({array.dtype.name}); {declared}{narrowed}")
    return cast


def to_float_reward(reward: Any) -> np.float32:
    """Convert a reward to one number; an array of one element is accepted.

    Raises:
        TypeError: The reward is not one number.
    """
    array = np.asarray(reward)
    if array.size != 1 or array.dtype.kind not in "biuf":
        description = (
            f"{array.dtype} of shape {array.shape}" if array.dtype.kind in "biuf" else f"a {type(reward).__name__}"
        )
        raise TypeError(f"step returned a reward that is {description}; expected one number")
    return np.float32(array.reshape(()))


def to_bool_flag(name: str, flag: Any) -> bool:
    """Convert a flag to a bool; 0 and 1, and an array of one element, are accepted too.

    Raises:
        TypeError: The value is not a flag.
    """
    array = np.asarray(flag)
    if array.size != 1 or array.dtype.kind not in "biuf" or array.reshape(()) not in (0, 1):
        raise TypeError(f"step returned {name}={flag!r}; expected True or False")
    return bool(array.reshape(()))
