"""Sums of rows by a number for each."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def segment_sums(
    rows: Float[Array, "row width"], segment: Int[Array, " row"], count: int
) -> Float[Array, "segment width"]:
    """The sum of the rows of each segment; rows of a segment past the last are left out."""
    zeros = jnp.zeros((count, rows.shape[-1]), rows.dtype)
    return zeros.at[segment].add(rows, mode="drop")
