"""Rows that are read and written in one step, in place."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

NOWHERE = jnp.iinfo(jnp.int32).max


def once_read(rows: Int[Array, " rows"], *read: Shaped[Array, "rows ..."]) -> Int[Array, " rows"]:
    """The same numbers, which no compiler knows before it has `read`.

    XLA writes into an array in place where all that is read of it was read before, which it sees only if what is written, or
    where to, depends on that. An optimization barrier is gone when it looks.
    """
    for values in read:
        bits = 8 * values.dtype.itemsize
        words = jax.lax.bitcast_convert_type(values, f"uint{bits}").reshape(rows.shape[0], -1)
        # No word has more ones than bits.
        rows = jnp.where((jax.lax.population_count(words) > bits).any(axis=1), NOWHERE, rows)
    return rows
