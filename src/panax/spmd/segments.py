"""Sums of rows by a number for each, added up in one order: so the same bits in every run.

A scatter that adds is a loop over its rows on a CPU, in their order. On a GPU it is as many atomic additions, whose order is
another one each time, and which wait for each other where a number is frequent. There rows are sorted by their number, and added
up block by block: a matrix of zeros and ones, which numbers stand where in a block, is multiplied with the block's rows.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core.target import Target
from .marks import linear_in

BLOCK = 32
"""Rows that one multiplication adds up: a row costs 2 x BLOCK FLOPs a number, and each level has BLOCK times fewer."""


def segment_sums(
    rows: Float[Array, "row width"],
    segment: Int[Array, " row"],
    count: int,
    *,
    target: Target,
    ascending: bool = False,
) -> Float[Array, "segment width"]:
    """The sum of the rows of each segment; rows of a segment past the last are left out.

    Args:
        ascending: Segments stand in their order already.

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
    """As `segment_sums`, of segments in ascending order, without a scatter of rows.

    A segment's rows lie in one block, or at the end of one, in some whole ones and at the start of another: what it has in its
    first block is read from there, and what blocks have at their start is added up in the same way, block times fewer rows.
    """
    if not rows.size:
        return jnp.zeros((count, rows.shape[1]), rows.dtype)
    finite = jnp.isfinite(rows)
    sums = _sums_of_finite(jnp.where(finite, rows, 0), segment, count, block)

    # In those products a number that is not finite would spoil all segments of its block: 0 times infinity is NaN.
    def with_others() -> jax.Array:
        up, down = (
            _sums_of_finite((~finite & (rows != other)).astype(rows.dtype), segment, count, block) > 0
            for other in (-jnp.inf, jnp.inf)
        )
        return jnp.where(up & down, jnp.nan, jnp.where(up, jnp.inf, jnp.where(down, -jnp.inf, sums)))

    return linear_in(jax.lax.cond(finite.all(), lambda: sums, with_others), rows)


def _sums_of_finite(
    rows: Float[Array, "row width"], segment: Int[Array, " row"], count: int, block: int
) -> Float[Array, "segment width"]:
    size, width = rows.shape
    blocks = -(-size // block)
    rows = jnp.pad(rows, ((0, blocks * block - size), (0, 0)))
    segment = jnp.pad(segment, (0, blocks * block - size), constant_values=count)
    new = jnp.concatenate([jnp.ones(1, bool), segment[1:] != segment[:-1]])
    number = jnp.cumsum(new, dtype=jnp.int32).reshape(blocks, block)
    place = number - number[:, :1]
    chosen = (place[:, None, :] == jnp.arange(block, dtype=jnp.int32)[None, :, None]).astype(rows.dtype)
    parts = jnp.einsum("bpr,brw->bpw", chosen, rows.reshape(blocks, block, width), precision=jax.lax.Precision.HIGHEST)
    row = jnp.arange(blocks * block, dtype=jnp.int32)
    nowhere = blocks * block
    first = jnp.full(count, nowhere, jnp.int32).at[jnp.where(new, segment, count)].set(row, mode="drop")
    inside = place.reshape(-1).at[first].get(mode="fill", fill_value=0)
    at = jnp.where(first < nowhere, first // block * block + inside, nowhere)
    sums = parts.reshape(-1, width).at[at].get(mode="fill", fill_value=0)
    if blocks == 1:
        return sums
    heads = jnp.where(new[::block][:, None], jnp.zeros((), rows.dtype), parts[:, 0])
    return sums + _sums_of_finite(heads, segment[::block], count, block)
