"""Heads that several others share, as key-value heads are by queries, on mesh axes that do not divide them."""

import math

import jax
import jax.numpy as jnp

from ..core.layout import current_layout
from ..spmd.collectives import axis_index


def own_shared(local: int, *arrays: jax.Array, heads: str = "heads", shared: str = "kv_heads") -> tuple[jax.Array, ...]:
    """Those of the shared heads that this device's heads use, where the mesh axes of these don't split the shared ones.

    Args:
        local: How many heads this device has.
        arrays: With the shared heads, all or this device's part, along the third dimension.
        heads: The logical axis of the heads; `shared` is that of what adjacent ones share.
    """
    layout = current_layout()
    if layout is None:
        return arrays
    split, shared_split = layout.compute((heads,))[0], layout.compute((shared,))[0]
    if split == shared_split:
        return arrays
    group = local * jax.lax.axis_size(split) // arrays[0].shape[2]
    first = axis_index(split) * local
    # Adjacent heads share one: take each once where they fall into equal groups, else one for each head.
    each = math.gcd(local, group) if local % group and group % local else min(local, group)
    own = (first + jnp.arange(0, local, each)) // group
    return tuple(jnp.take(x, own, axis=2) for x in arrays)
