"""Statistics of one array: size of its values, range, zeros, and values that are not finite."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

FIELDS = 7
"""Length of the vector of `measure_array`."""


@dataclasses.dataclass(frozen=True)
class ArrayStatistics:
    """Statistics of an array, on one device or of several parts of equal size.

    Attributes:
        elements: Number of elements of all parts.
        rms: Root of the mean of the squares of finite values, others counted as 0.
        low: Smallest finite value; NaN if there is none.
        high: Largest finite value; NaN if there is none.
        zeros: Share of elements that are 0, from 0 to 1.
        not_finite: Share of elements that are NaN or infinite.
        nan: Share of elements that are NaN.
    """

    elements: int
    rms: float
    low: float
    high: float
    zeros: float
    not_finite: float
    nan: float

    @property
    def norm(self) -> float:
        """Return the Euclidean norm of the finite values."""
        return self.rms * math.sqrt(self.elements)


def measure_array(array: Array) -> Float[Array, "7"]:
    """Compute the statistics of an array that is not empty, as a vector for `read_statistics`.

    Squares are taken of values divided by the largest one, so that they neither overflow nor vanish.
    """
    values = array.astype(jnp.float32)
    finite = jnp.isfinite(values)
    size = jnp.where(finite, jnp.abs(values), jnp.float32(0))
    top = size.max()
    scaled = size / jnp.where(top > 0, top, jnp.float32(1))
    return jnp.stack(
        [
            top,
            jnp.mean(scaled * scaled),
            jnp.where(finite, values, jnp.float32(jnp.inf)).min(),
            jnp.where(finite, values, jnp.float32(-jnp.inf)).max(),
            jnp.mean((values == 0).astype(jnp.float32)),
            jnp.mean((~finite).astype(jnp.float32)),
            jnp.mean(jnp.isnan(values).astype(jnp.float32)),
        ]
    )


def read_statistics(vectors: Float[np.ndarray, "part 7"], elements: int) -> ArrayStatistics:
    """Merge the vectors of parts of equal size.

    Args:
        elements: Number of elements of one part.

    >>> vectors = np.stack([measure_array(jnp.array([3.0, 0.0])), measure_array(jnp.array([jnp.nan, -4.0]))])
    >>> found = read_statistics(vectors, 2)
    >>> round(found.norm, 6), found.low, found.high, found.zeros, found.not_finite
    (5.0, -4.0, 3.0, 0.25, 0.25)
    """
    vectors = np.asarray(vectors, np.float64).reshape(-1, FIELDS)
    top, square, low, high, zeros, not_finite, nan = vectors.T
    lowest, highest = low.min(), high.max()
    return ArrayStatistics(
        elements=elements * len(vectors),
        rms=float(np.sqrt(np.mean(top**2 * square))),
        low=float(lowest) if np.isfinite(lowest) else math.nan,
        high=float(highest) if np.isfinite(highest) else math.nan,
        zeros=float(zeros.mean()),
        not_finite=float(not_finite.mean()),
        nan=float(nan.mean()),
    )


def flag_array(array: Array) -> Array:
    """Return whether an array holds NaN, and whether it holds infinity, as a vector of two bools."""
    return jnp.stack([jnp.isnan(array).any(), jnp.isinf(array).any()])


def is_measurable(shape: Sequence[int], dtype: object) -> bool:
    """Return True for an array of real numbers that is not empty."""
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)  # pyright: ignore[reportArgumentType]
    return not extended and jnp.issubdtype(dtype, jnp.floating) and math.prod(shape) > 0  # pyright: ignore[reportArgumentType]


def worst_first(statistics: Iterable[tuple[str, ArrayStatistics]]) -> list[str]:
    """Return the names of arrays with values that are not finite, in their order.

    >>> fine, bad = (ArrayStatistics(4, 1.0, -1.0, 1.0, 0.0, share, share) for share in (0.0, 0.5))
    >>> worst_first([("a", fine), ("b", bad)])
    ['b']
    """
    return [name for name, each in statistics if each.not_finite > 0]
