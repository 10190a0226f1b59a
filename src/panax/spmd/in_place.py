"""Rows that are read and then overwritten, in place, within one step."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

OUT_OF_RANGE = jnp.iinfo(jnp.int32).max


def read_before_write(
    array: Shaped[Array, "row ..."], rows: Int[Array, " rows"], then: Int[Array, " rows"]
) -> tuple[Shaped[Array, "rows ..."], Int[Array, " rows"]]:
    """Read rows before they are overwritten; return them and the row indices to write.

    XLA writes into an array in place only if every read of it precedes the write. It can see that only if the
    written values or the write indices depend on the rows read, and if the rows are read once: on GPU they
    would otherwise be read again at each use.

    Args:
        rows: Indices to read, clipped to the valid range.
        then: Indices to write. They are returned unchanged, but as values that no compiler can know before it
            has read the rows.
    """
    read = jax.lax.optimization_barrier(array.at[rows].get(mode="clip"))
    bits = 8 * read.dtype.itemsize
    words = jax.lax.bitcast_convert_type(read, f"uint{bits}").reshape(rows.shape[0], -1)
    # Never true: no word has more ones than bits.
    return read, jnp.where((jax.lax.population_count(words) > bits).any(axis=1), OUT_OF_RANGE, then)
