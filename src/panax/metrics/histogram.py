"""`Histogram`: the distribution of an array's values, counted without moving the array."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

BINS = 64


class Histogram(NamedTuple):
    """Counts of an array's finite values in equal bins from the smallest to the largest.

    Attributes:
        counts: Number of values in each bin.
        least: The smallest value; 0 if none is finite.
        greatest: The largest value.
        total: The sum of all values.
        squares: The sum of their squares.
        not_finite: Number of NaN or infinite values; they are not in `counts`.
    """

    counts: Int[np.ndarray, " bins"]
    least: float
    greatest: float
    total: float
    squares: float
    not_finite: int = 0

    @property
    def edges(self) -> Float[np.ndarray, " edges"]:
        """Return the edges of the bins."""
        return np.linspace(self.least, self.greatest, len(self.counts) + 1)


def compute_histogram(values: Float[Array, "..."], bins: int = BINS) -> Histogram:
    """Compute the histogram of an array of any shape, as arrays: to be traced, then fetched with
    `fetch_histogram`.

    Bins are counted by comparisons with their edges, not by a scatter: a sharded array is not moved.

    >>> fetch_histogram(compute_histogram(jnp.array([0.0, 1.0, 1.0, 4.0]), bins=4)).counts.tolist()
    [1, 2, 0, 1]
    """
    values = jnp.atleast_1d(values).astype(jnp.float32)
    finite = jnp.isfinite(values)
    finite_values = jnp.where(finite, values, 0.0)
    none = ~finite.any()
    smallest = jnp.where(none, 0.0, jnp.min(jnp.where(finite, values, jnp.inf)))
    greatest = jnp.where(none, 0.0, jnp.max(jnp.where(finite, values, -jnp.inf)))
    edges = smallest + (greatest - smallest) * (jnp.arange(1, bins, dtype=jnp.float32) / bins)
    below = jax.lax.map(lambda edge: _count(finite & (values < edge)), edges)
    number = _count(finite)
    counts = jnp.diff(jnp.concatenate([jnp.zeros(1), below, number[None]]))
    fields = (counts, smallest, greatest, finite_values.sum(), (finite_values * finite_values).sum(), _count(~finite))
    return Histogram(*fields)  # pyright: ignore[reportArgumentType]


def _count(mask: Bool[Array, "..."]) -> Float[Array, ""]:
    """Count true values, also in arrays with more than 2**31 elements: exact in each row."""
    return mask.sum(axis=-1, dtype=jnp.int32).astype(jnp.float32).sum()


def fetch_histogram(traced: Histogram) -> Histogram:
    """Fetch a traced histogram to the host."""
    counts, least, greatest, total, squares, not_finite = jax.device_get(tuple(traced))
    figures = (float(least), float(greatest), float(total), float(squares))
    return Histogram(np.asarray(counts, np.int64), *figures, int(not_finite))
