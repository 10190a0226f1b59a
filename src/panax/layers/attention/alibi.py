"""Attention with linear biases (ALiBi): scores grow with a key's position, by a slope of each head.

Source: "Train Short, Test Long" (arXiv:2108.12409), section 3. As in BLOOM's code the bias is `slope * position of the key`;
it differs from `-slope * distance` by the same number for all keys of a query, which a softmax ignores.

The bias is a product of additional features of queries and keys, so that every kernel and every layout computes it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ...core import current_layout
from ...spmd.collectives import axis_index

FEATURES = 8
"""Additional features of a head: six products, and zeros up to the multiple that kernels prefer."""

MOST_POSITIONS = 1 << 16
"""Positions of which both parts are exact in bfloat16."""

_PART = 256


def slope_parts(slopes: tuple[float, ...], scale: float) -> np.ndarray:
    """Return each slope, divided by the factor of scores, as a sum of three values that are exact in bfloat16: [heads, 3].

    >>> float(slope_parts((0.7,), 0.5).astype(np.float64).sum()) - 1.4 < 1e-7
    True
    """
    rest = np.asarray(slopes, np.float64) / scale
    parts = []
    for _ in range(3):
        part = rest.astype(jnp.bfloat16).astype(np.float64)
        parts.append(part)
        rest = rest - part
    return np.stack(parts, axis=-1).astype(np.float32)


def add_alibi(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    position: Int[Array, "batch seq"],
    parts: np.ndarray,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Append features to queries and keys that add the bias to their scores, and zeros to values.

    Args:
        q: This device's heads.
        parts: `slope_parts` of all heads.
    """
    layout, heads = current_layout(), q.shape[2]
    axes = () if layout is None else layout.compute(("heads",))[0]
    local = jnp.asarray(parts)
    if local.shape[0] != heads:
        local = jax.lax.dynamic_slice_in_dim(local, axis_index(axes) * heads, heads)
    low = position % _PART
    both = jnp.stack([position - low, low], axis=-1).astype(k.dtype)
    # Each part of a slope meets each part of a position.
    of_queries = jnp.pad(jnp.repeat(local, 2, axis=-1), ((0, 0), (0, FEATURES - 6))).astype(q.dtype)
    of_keys = jnp.pad(jnp.tile(both, (1, 1, 3)), ((0, 0), (0, 0), (0, FEATURES - 6)))
    q = jnp.concatenate([q, jnp.broadcast_to(of_queries[None, None], (*q.shape[:3], FEATURES))], axis=-1)
    k = jnp.concatenate([k, jnp.broadcast_to(of_keys[:, :, None], (*k.shape[:3], FEATURES))], axis=-1)
    return q, k, jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, FEATURES)))
