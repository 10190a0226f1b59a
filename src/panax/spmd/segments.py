"""Deterministic segment sums: the terms of each sum are added in a fixed order, so every run gives the same
bits.

On CPU a scatter-add is a loop over rows in order. On GPU it is one atomic addition per row, in an order that
differs between runs, and additions to a frequent segment wait for each other. There, rows are sorted by
segment and summed block by block: a 0/1 matrix of which row belongs to which segment in a block is multiplied
with the block's rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core.layout.target import Target
from .sharding_marks import mark_segment_sums

BLOCK = 32
"""Rows summed by one matmul: a row costs 2 x BLOCK FLOPs per element, and each level has BLOCK times fewer
rows.
"""


def segment_sums(
    rows: Float[Array, "row width"],
    segment: Int[Array, " row"],
    count: int,
    *,
    target: Target,
    ascending: bool = False,
) -> Float[Array, "segment width"]:
    """Sum the rows of each segment; rows with a segment id of `count` or more are dropped.

    Args:
        segment: Segment id of each row.
        count: Number of segments.
        ascending: True if `segment` is already sorted.

    >>> segment_sums(jnp.ones((3, 1)), jnp.array([1, 0, 1]), 2, target=Target("cpu")).tolist()
    [[1.0], [2.0]]
    """
    if target.traits.scatters_in_order:
        zeros = jnp.zeros((count, rows.shape[-1]), rows.dtype)
        return zeros.at[segment].add(rows, mode="drop")
    if not ascending:
        order = jnp.argsort(segment)
        rows, segment = rows[order], segment[order]
    return sums_by_blocks(rows, segment, count)


def sums_by_blocks(
    rows: Float[Array, "row width"], segment: Int[Array, " row"], count: int, block: int = BLOCK
) -> Float[Array, "segment width"]:
    """Sum the rows of each segment as `segment_sums` does, for sorted segments and without a scatter of rows.

    A segment may be contained in one block, or start at the end of one block, cover several and end at the
    start of another. Its sum within its first block is read directly; the sums at the starts of later blocks
    are summed recursively, with `block` times fewer rows.
    """
    if not rows.size:
        return jnp.zeros((count, rows.shape[1]), rows.dtype)
    finite = jnp.isfinite(rows)
    sums = _sums_of_finite(jnp.where(finite, rows, 0), segment, count, block)

    # In these matmuls a non-finite element would spoil all segments of its block, since 0 times infinity is
    # NaN. So they run on finite elements only, and infinities and NaN are put back where they belong.
    def with_others() -> jax.Array:
        def found(values: jax.Array, excluded: float) -> jax.Array:
            here = ~jnp.isfinite(values) & (values != excluded)
            return _sums_of_finite(here.astype(values.dtype), segment, count, block) > 0

        # One after the other: together they take twice the memory.
        up, values = jax.lax.optimization_barrier((found(rows, -jnp.inf), rows))
        down = found(values, jnp.inf)
        return jnp.where(up & down, jnp.nan, jnp.where(up, jnp.inf, jnp.where(down, -jnp.inf, sums)))

    return mark_segment_sums(jax.lax.cond(finite.all(), lambda: sums, with_others), rows, segment)


def _sums_of_finite(
    rows: Float[Array, "row width"], segment: Int[Array, " row"], count: int, block: int
) -> Float[Array, "segment width"]:
    """Sum finite rows by sorted segments.

    Legend of subscripts: b block, p position of a segment within the block, r row within the block, w width.
    """
    size, width = rows.shape
    blocks = -(-size // block)
    rows = jnp.pad(rows, ((0, blocks * block - size), (0, 0)))
    segment = jnp.pad(segment, (0, blocks * block - size), constant_values=count)
    # Number the segments in order of appearance; `place` restarts at 0 in each block.
    new = jnp.concatenate([jnp.ones(1, bool), segment[1:] != segment[:-1]])
    number = jnp.cumsum(new, dtype=jnp.int32).reshape(blocks, block)
    place = number - number[:, :1]
    chosen = (place[:, None, :] == jnp.arange(block, dtype=jnp.int32)[None, :, None]).astype(rows.dtype)
    parts = jnp.einsum("bpr,brw->bpw", chosen, rows.reshape(blocks, block, width), precision=jax.lax.Precision.HIGHEST)
    # Find the first row of each segment, and read the segment's sum in the block of that row.
    row = jnp.arange(blocks * block, dtype=jnp.int32)
    nowhere = blocks * block
    first = jnp.full(count, nowhere, jnp.int32).at[jnp.where(new, segment, count)].set(row, mode="drop")
    inside = place.reshape(-1).at[first].get(mode="fill", fill_value=0)
    at = jnp.where(first < nowhere, first // block * block + inside, nowhere)
    sums = parts.reshape(-1, width).at[at].get(mode="fill", fill_value=0)
    if blocks == 1:
        return sums
    # If the first row of a block continues a segment, the rest of that segment's sum is at position 0 of the
    # block: add these up, one per block.
    heads = jnp.where(new[::block][:, None], jnp.zeros((), rows.dtype), parts[:, 0])
    return sums + _sums_of_finite(heads, segment[::block], count, block)
