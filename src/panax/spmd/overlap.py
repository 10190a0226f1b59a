"""Gathers and scatters along the sequence, cut into a ring of sends that hide behind parts of the product.

An all-gather must end before the product that reads it begins. Cut in as many parts as there are devices, a device multiplies the
part it has while the next one arrives; and where a product's partial sums are scattered, it multiplies one part while the sum of
another travels. The bytes are those of the gather and the scatter. Asked for by `rules.overlap`: a backend that runs sends beside
products (GPU, TPU) gains where the products are large, and all others lose.

Source: Overlap communication with dependent computation via decomposition (Wang et al., ASPLOS 2023), section 4.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ..core.layout import MeshAxes, current_layout
from .marks import ValueState, assert_sharding

Products = Sequence[Callable[[jax.Array], jax.Array]]


def overlaps(axes: MeshAxes) -> bool:
    """Whether collectives over `axes` are to be run as rings; over one mesh axis only."""
    layout = current_layout()
    return layout is not None and layout.overlap and len(axes) == 1


def gather_matmul(x: jax.Array, axes: MeshAxes, products: Products) -> tuple[jax.Array, list[jax.Array]]:
    """`x` gathered along its second dimension, and what each product makes of it.

    Args:
        products: Each from rows of `x` to rows of its result, along the second dimension.
    """
    size, me = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    rows = x.shape[1]
    part, whole, outs = x, None, None
    for step in range(size):
        # Sent before it is multiplied, so that the two run side by side.
        following = _sent(part, axes) if step < size - 1 else part
        at = (me - step) % size * rows
        # In the end every device has multiplied all parts, whichever it had at first.
        found = [part, *(product(assert_sharding(part, dict.fromkeys(axes, ValueState.WHOLE))) for product in products)]
        if whole is None or outs is None:
            whole, *outs = [jnp.zeros((y.shape[0], y.shape[1] * size, *y.shape[2:]), y.dtype) for y in found]
        whole, *outs = [
            jax.lax.dynamic_update_slice_in_dim(target, y, at, axis=1) for target, y in zip([whole, *outs], found)
        ]
        part = following
    assert whole is not None and outs is not None
    return assert_sharding(whole, dict.fromkeys(axes, ValueState.WHOLE)), outs


def matmul_scatter(product: Callable[[jax.Array], jax.Array], axes: MeshAxes, rows: int) -> jax.Array:
    """The sum of a product over `axes`, of which this device keeps its part along the second dimension.

    Args:
        product: From the first row of a part to this device's share of that part.
        rows: Of each part.
    """
    size, me = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    total = product((me - 1) % size * rows)
    for step in range(1, size):
        arriving = _sent(total, axes)
        total = arriving + product((me - 1 - step) % size * rows)
    return assert_sharding(total, dict.fromkeys(axes, ValueState.SPLIT), dim=1)


def rows_of(x: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    """`rows` rows of the second dimension."""
    return jax.lax.dynamic_slice_in_dim(x, start, rows, axis=1)


def _sent(x: jax.Array, axes: MeshAxes) -> jax.Array:
    size = jax.lax.axis_size(axes)
    return jax.lax.ppermute(x, axes[0], [(i, (i + 1) % size) for i in range(size)])
