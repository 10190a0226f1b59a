"""Selection of heads shared by several others, such as key-value heads, if their mesh axes do not shard
them."""

import math

import jax
import jax.numpy as jnp

from ...core.layout.layout import current_layout
from ...spmd.collectives import axis_index


def local_shared_heads(
    local: int, *arrays: jax.Array, heads: str = "heads", shared: str = "kv_heads"
) -> tuple[jax.Array, ...]:
    """Select the shared heads that this device's heads use, if the shared heads are not sharded like the
    heads.

    Args:
        local: Number of heads on this device.
        arrays: Arrays with the shared heads, all of them or this device's shard, along the third dimension.
        heads: Logical axis of the heads.
        shared: Logical axis of the heads shared by adjacent ones.
    """
    layout = current_layout()
    if layout is None:
        return arrays
    split, shared_split = layout.compute((heads,))[0], layout.compute((shared,))[0]
    if split == shared_split:
        return arrays
    group = local * jax.lax.axis_size(split) // arrays[0].shape[2]
    first = axis_index(split) * local
    # Adjacent heads share one: take each shared head once if local heads form equal groups, else one per head.
    each = math.gcd(local, group) if local % group and group % local else min(local, group)
    shared_indices = (first + jnp.arange(0, local, each)) // group
    return tuple(jnp.take(x, shared_indices, axis=2) for x in arrays)
