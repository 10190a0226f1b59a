"""Dropout with a mask that depends only on (key, global row, position, feature).

The same seed drops the same elements on any mesh, with any number of micro-batches, and again in the backward
pass of a rematerialized layer. Bits are a hash of counters, computed where used: nothing is stored or
communicated.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .counter_rng import mix


def dropout(
    x: Float[Array, "batch seq feature"],
    rate: float,
    key: jax.Array,
    row: Int[Array, " batch"],
    position: Int[Array, " seq"] | None = None,
) -> Float[Array, "batch seq feature"]:
    """Zero each element with probability `rate` and divide the others by `1 - rate`.

    Args:
        rate: In [0, 1).
        key: Key of this step, layer and use.
        row: Index of each row in the global batch.
        position: Index of each position in its whole row; 0, 1, 2, ... by default.
    """
    if rate == 0.0:
        return x
    scale = jnp.where(uniform(x.shape, key, row, position) < rate, 0.0, 1.0 / (1.0 - rate)).astype(x.dtype)
    return x * scale


def uniform(
    shape: tuple[int, ...], key: jax.Array, row: Int[Array, " batch"], position: Int[Array, " seq"] | None = None
) -> Float[Array, "batch seq feature"]:
    """Return float32 values in [0, 1) of shape `batch seq feature`; the arguments are those of `dropout`."""
    words = jax.random.bits(key, (4,), jnp.uint32)
    position = (jnp.arange(shape[1]) if position is None else position).astype(jnp.uint32)[None, :, None]
    feature = jax.lax.broadcasted_iota(jnp.uint32, shape, 2)
    # Each round is keyed, so that two rows, positions or keys never see shifted copies of one mask.
    h = mix(row.astype(jnp.uint32) ^ words[0])[:, None, None]
    h = mix((h ^ words[1]) + position)
    h = mix((h ^ words[2]) + feature)
    # 24 bits fill a float32's mantissa exactly.
    return ((h ^ words[3]) >> 8).astype(jnp.float32) * jnp.float32(2**-24)
