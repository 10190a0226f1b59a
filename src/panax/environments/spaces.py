"""Spaces of observations and actions: `Box`, arrays between bounds, and `Discrete`, one of a number of
choices."""

import abc
import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Key, Num

from ..core.errors import RecipeError
from ..core.validation import Validated

BoxType = Literal["float32", "float64", "int32", "uint8", "bool"]

_LEAST_CHOICES = 1


class Space(Validated, abc.ABC):
    """A set of values of one shape and dtype. Spaces are compared and hashed by value."""

    @property
    @abc.abstractmethod
    def abstract(self) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of one value."""

    @abc.abstractmethod
    def sample(self, key: Key[Array, ""]) -> Num[Array, "..."] | Bool[Array, "..."]:
        """Draw one value, uniformly between finite bounds."""

    @abc.abstractmethod
    def contains(self, value: Num[Array, "..."] | Bool[Array, "..."]) -> Bool[Array, ""]:
        """Return True if a value of the right shape and dtype is in this set. NaN never is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Discrete(Space):
    """One of `count` choices: 0 to `count - 1`, as int32.

    >>> Discrete(count=3).contains(jnp.int32(3)).item()
    False
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < _LEAST_CHOICES:
            raise RecipeError(f"Discrete(count={self.count}); expected {_LEAST_CHOICES} or more choices")

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), jnp.int32)

    def sample(self, key: Key[Array, ""]) -> Num[Array, "..."]:
        return jax.random.randint(key, (), 0, self.count, jnp.int32)

    def contains(self, value: Num[Array, "..."]) -> Bool[Array, ""]:
        return jnp.all((value >= 0) & (value < self.count))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Box(Space):
    """Arrays with elements between `low` and `high`, both included.

    Attributes:
        low: One bound for all elements, or one for each, as nested tuples of the shape; may be infinite.
        high: The same for the upper bounds.
        shape: Shape of one value.
        dtype: Dtype of one value.

    >>> Box(low=-1.0, high=(1.0, 2.0), shape=(2,)).contains(jnp.array([0.0, 1.5])).item()
    True
    """

    infinite_fields = frozenset({"low", "high"})

    low: float | tuple[Any, ...]
    high: float | tuple[Any, ...]
    shape: tuple[int, ...] = ()
    dtype: BoxType = "float32"

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.shape):
            raise RecipeError(f"Box(shape={self.shape}); expected sizes of 1 or more")
        for name, bounds in (("low", self.low), ("high", self.high)):
            try:
                array = np.asarray(bounds, np.float64)
            except (TypeError, ValueError):
                array = np.empty(0)
            if isinstance(bounds, tuple) and self.shape != array.shape:
                raise RecipeError(
                    f"Box.{name} has {len(bounds)} bounds for the shape {self.shape}; pass one number for all elements, or "
                    f"one for each, as nested tuples of that shape"
                )
        if not np.all(self.lower <= self.upper):
            raise RecipeError(f"Box(low={self.low}, high={self.high}); expected no lower bound above its upper bound")

    @property
    def lower(self) -> np.ndarray:
        """Return the lower bounds, float64, of a shape that broadcasts to `shape`."""
        return np.asarray(self.low, np.float64)

    @property
    def upper(self) -> np.ndarray:
        """Return the upper bounds, float64, of a shape that broadcasts to `shape`."""
        return np.asarray(self.high, np.float64)

    @property
    def is_bounded(self) -> bool:
        """Return True if all bounds are finite."""
        return bool(np.isfinite(self.lower).all() and np.isfinite(self.upper).all())

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    def sample(self, key: Key[Array, ""]) -> Num[Array, "..."] | Bool[Array, "..."]:
        if self.dtype == "bool":
            return jax.random.bernoulli(key, 0.5, self.shape)
        if self.dtype in ("int32", "uint8"):
            limits = np.iinfo(self.dtype)
            low, high = (np.asarray(np.clip(bound, limits.min, limits.max)) for bound in (self.lower, self.upper))
            uniform = jax.random.uniform(key, self.shape, jnp.float32)
            integers = jnp.floor(self._between(uniform, low, np.asarray(high + 1.0)))
            return jnp.clip(integers, self._full(low), self._full(high)).astype(self.dtype)
        # Without a bound, values are drawn within 1 of the other bound, or of 0, with any sign.
        low, high = np.broadcast_arrays(self.lower, self.upper)
        below, above = np.isfinite(low), np.isfinite(high)
        lowest = np.where(below, low, np.where(above, high, 0.0) - 1.0)
        highest = np.where(above, high, np.where(below, low, 0.0) + 1.0)
        return self._between(jax.random.uniform(key, self.shape, jnp.dtype(self.dtype)), lowest, highest)

    def contains(self, value: Num[Array, "..."] | Bool[Array, "..."]) -> Bool[Array, ""]:
        if self.dtype == "bool":
            return jnp.bool_(True)
        wide = value.astype(jnp.float32)
        return jnp.all((wide >= self._full(self.lower)) & (wide <= self._full(self.upper)))

    def clip(self, value: Num[Array, "*batch"]) -> Num[Array, "*batch"]:
        """Clip a value, or a batch of values with leading axes, to the bounds."""
        low, high = (
            jnp.broadcast_to(self._full(bound).astype(value.dtype), value.shape) for bound in (self.lower, self.upper)
        )
        return jnp.clip(value, low, high)

    @property
    def size(self) -> int:
        """Return the number of elements of one value."""
        return math.prod(self.shape)

    def _full(self, bound: np.ndarray) -> jax.Array:
        return jnp.asarray(np.broadcast_to(bound, self.shape), jnp.float32)

    def _between(self, unit: jax.Array, low: np.ndarray, high: np.ndarray) -> jax.Array:
        least, most = (jnp.asarray(np.broadcast_to(bound, self.shape), unit.dtype) for bound in (low, high))
        return least + unit * (most - least)


def normalize_bounds(bounds: Any, shape: tuple[int, ...]) -> Any:
    """Return bounds of each element in the form of `Box`: one number if all are equal, else nested tuples of
    the shape.

    >>> normalize_bounds([1.0, 1.0, 9.0, 9.0], (2, 2)), normalize_bounds([1.0, 1.0], (2,))
    (((1.0, 1.0), (9.0, 9.0)), 1.0)
    """
    array = np.asarray(bounds, np.float64).reshape(shape)
    if array.size and np.all(array == array.flat[0]):
        return float(array.flat[0])
    return _nested(array.tolist())


def _nested(value: Any) -> Any:
    return tuple(map(_nested, value)) if isinstance(value, list) else value
