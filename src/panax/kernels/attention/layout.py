"""Division of the score matrix in blockwise attention, and the layout of its arrays.

In the inner loop every array is [block, row, ...], so that a block is one contiguous slice; a row is a
(batch, key-value head) pair, and the queries of the heads of its group are concatenated.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from panax.core.layout.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreBlocks:
    """Division of the score matrix into blocks.

    Attributes:
        query: Queries of one head per block.
        key: Keys per block.
        batch: Sequences in one step; divides the batch.
        kv_heads: Key-value heads in one step; divides their number.
        target: Target of the program.
    """

    query: int
    key: int
    batch: int
    kv_heads: int
    target: Target


class ScoreLayout(NamedTuple):
    """Sizes of one call, named by the letters of the layouts below."""

    b: int  # batch
    g: int  # key-value heads
    r: int  # query heads per key-value head
    q: int  # query length
    k: int  # key length
    blocks: ScoreBlocks

    @property
    def query_blocks(self) -> int:
        return -(-self.q // self.blocks.query)

    @property
    def key_blocks(self) -> int:
        return -(-self.k // self.blocks.key)


def choose_blocks(
    q: Float[Array, "batch query_seq heads head_dim"],
    k: Float[Array, "batch key_seq kv_heads head_dim"],
    *,
    window: int | None,
    target: Target,
    block_size: int | None = None,
) -> ScoreBlocks:
    """Choose blocks for a target: of the size of its cache if that is faster, else all rows at once.

    Args:
        q: Only its shape is read, like that of k.
        block_size: Queries and keys per block, instead of the automatic choice.
    """
    batch, query_seq, heads, _ = q.shape
    key_seq, kv_heads = k.shape[1:3]
    # Query heads of a key-value head share a block, so a block holds fewer queries of each.
    group = heads // kv_heads
    if block_size is not None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size} must be at least 1")
        query, key = min(block_size, query_seq), min(block_size, key_seq)
    else:
        # A block much longer than the window would compute mostly masked scores.
        max_block_size = 512 if window is None else min(512, max(128, 1 << (window - 1).bit_length()))
        query = _even_block(query_seq, max(64, max_block_size // group))
        key = _even_block(key_seq, max_block_size)
    cached = target.traits.scores_in_cache
    if cached is None:
        return ScoreBlocks(query=query, key=key, batch=batch, kv_heads=kv_heads, target=target)
    rows = max(1, cached // (group * query * key))
    if rows < kv_heads:
        return ScoreBlocks(query=query, key=key, batch=1, kv_heads=_largest_divisor(kv_heads, rows), target=target)
    together = _largest_divisor(batch, rows // kv_heads)
    return ScoreBlocks(query=query, key=key, batch=together, kv_heads=kv_heads, target=target)


def _largest_divisor(number: int, at_most: int) -> int:
    return max(n for n in range(1, number + 1) if number % n == 0 and n <= at_most)


def _even_block(length: int, max_block: int) -> int:
    """Divide `length` into the fewest blocks of at most `max_block`, of equal size: little padding at any
    length."""
    if length <= max_block:
        return length
    block = -(-length // -(-length // max_block))
    return min(max_block, -(-block // 16) * 16)


def cut_scores(q: Array, k: Array, blocks: ScoreBlocks) -> ScoreLayout:
    return ScoreLayout(q.shape[0], k.shape[2], q.shape[2] // k.shape[2], q.shape[1], k.shape[1], blocks)


def _padded(x: Array, length: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, length - x.shape[1])
    return jnp.pad(x, widths) if length > x.shape[1] else x


def query_blocks(x: Array, cut: ScoreLayout, transpose: bool = False) -> Array:
    """Convert [batch, seq, heads, d] to [block, row, group * query, d], or with d before the queries."""
    blocks, d = cut.query_blocks, x.shape[-1]
    x = _padded(x, blocks * cut.blocks.query).reshape(x.shape[0], blocks, cut.blocks.query, -1, cut.r, d)
    if transpose:  # b i q g r d -> i b g d r q
        return x.transpose(1, 0, 3, 5, 4, 2).reshape(blocks, -1, d, cut.r * cut.blocks.query)
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(blocks, -1, cut.r * cut.blocks.query, d)


def from_query_blocks(x: Array, cut: ScoreLayout) -> Array:
    blocks, _, _, d = x.shape
    x = x.reshape(blocks, -1, cut.blocks.kv_heads, cut.r, cut.blocks.query, d)  # i b g r q d -> b i q g r d
    x = x.transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(x.shape[0], blocks * cut.blocks.query, -1, d)[:, : cut.q]


def key_blocks(x: Array, cut: ScoreLayout, transpose: bool = False) -> Array:
    """Convert [batch, seq, kv_heads, d] to [block, row, key, d], or with d before the keys."""
    blocks, d = cut.key_blocks, x.shape[-1]
    x = _padded(x, blocks * cut.blocks.key).reshape(x.shape[0], blocks, cut.blocks.key, -1, d)
    if transpose:  # b j k g d -> j b g d k
        return x.transpose(1, 0, 3, 4, 2).reshape(blocks, -1, d, cut.blocks.key)
    return x.transpose(1, 0, 3, 2, 4).reshape(blocks, -1, cut.blocks.key, d)


def from_key_blocks_t(x: Array, cut: ScoreLayout) -> Array:
    blocks, _, d, size = x.shape
    x = x.reshape(blocks, -1, cut.blocks.kv_heads, d, size).transpose(1, 0, 4, 2, 3)  # j b g d k -> b j k g d
    return x.reshape(x.shape[0], blocks * size, -1, d)[:, : cut.k]


def segment_blocks(segments: Array | None, count: int, size: int, cut: ScoreLayout) -> Array | None:
    """Convert [batch, seq] to [block, row, position]; every key-value head of a sequence gets its copy."""
    if segments is None:
        return None
    x = _padded(segments, count * size).reshape(segments.shape[0], count, size).swapaxes(0, 1)
    return jnp.repeat(x, cut.blocks.kv_heads, axis=1)
