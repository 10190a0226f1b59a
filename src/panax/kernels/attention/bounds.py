"""Range of blocks that each block of an attention kernel visits, and padding to whole blocks."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from panax.kernels.attention.mask import MaskRule


def block_bounds(
    query_segments: Array | None,
    key_segments: Array | None,
    mask: MaskRule,
    real: tuple[int, int],
    padded: tuple[int, int],
    sizes: tuple[int, int],
    *,
    of_keys: bool = False,
) -> Int[Array, "batch block 2"]:
    """Return the half-open range of key blocks that each query block can see: from positions, and from
    segments if given.

    Without segments the leading dimension is 1.

    Args:
        real: Query and key lengths before padding.
        padded: Query and key lengths, whole blocks.
        sizes: Queries and keys per block.
        of_keys: Return the range of query blocks that can see each key block instead.
    """
    counts = tuple(length // size for length, size in zip(padded, sizes))
    can_see = np.zeros(counts, bool)
    for pair in mask.block_pairs(*real, *sizes):
        can_see[pair] = True
    see = jnp.asarray(can_see)[None]
    if query_segments is not None and key_segments is not None:
        # Segments of two blocks can only match if the blocks' ranges of segment ids overlap.
        low_q, high_q = _block_range(query_segments, sizes[0])
        low_k, high_k = _block_range(key_segments, sizes[1])
        see = see & (low_q[:, :, None] <= high_k[:, None, :]) & (low_k[:, None, :] <= high_q[:, :, None])
    if of_keys:
        see = see.swapaxes(1, 2)
    count = see.shape[2]
    first = jnp.where(see.any(axis=2), jnp.argmax(see, axis=2), 0)
    stop = jnp.where(see.any(axis=2), count - jnp.argmax(see[:, :, ::-1], axis=2), 0)
    return jnp.stack([first, stop], axis=2).astype(jnp.int32)


def _block_range(segments: Array, size: int) -> tuple[Array, Array]:
    """Return the lowest and highest segment id of each block, ignoring padding."""
    blocks = segments.reshape(segments.shape[0], -1, size)
    return jnp.where(blocks == 0, np.iinfo(np.int32).max, blocks).min(axis=2), blocks.max(axis=2)


def round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def pad_to(x: Array, to: dict[int, int]) -> Array:
    widths = [(0, to.get(axis, length) - length) for axis, length in enumerate(x.shape)]
    return jnp.pad(x, widths) if any(after for _, after in widths) else x
