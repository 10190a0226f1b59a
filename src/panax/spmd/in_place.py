"""Rows that are read and written in one step, in place."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

NOWHERE = jnp.iinfo(jnp.int32).max


def read_first(
    whole: Shaped[Array, "row ..."], rows: Int[Array, " rows"], then: Int[Array, " rows"]
) -> tuple[Shaped[Array, "rows ..."], Int[Array, " rows"]]:
    """Some rows, clipped to those that are there, and the numbers of those that are written next.

    XLA writes into an array in place where all that is read of it was read before. It sees that only if what is written, or where
    to, depends on what is read; and if that is read once: on GPUs it would read again wherever it is used.

    Args:
        then: Numbers, which come back as they are, and which no compiler knows before it has read the rows.
    """
    read = jax.lax.optimization_barrier(whole.at[rows].get(mode="clip"))
    bits = 8 * read.dtype.itemsize
    words = jax.lax.bitcast_convert_type(read, f"uint{bits}").reshape(rows.shape[0], -1)
    # No word has more ones than bits.
    return read, jnp.where((jax.lax.population_count(words) > bits).any(axis=1), NOWHERE, then)
