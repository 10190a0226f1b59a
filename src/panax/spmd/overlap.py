"""All-gathers and reduce-scatters along the sequence, decomposed into rings of sends that overlap with the
matmul.

An all-gather must finish before the matmul that reads it can start. Decomposed into as many parts as there
are devices, a device multiplies one part while the next one arrives. For a matmul with partial sums that are
scattered, it multiplies one part while the sum of another is sent. The bytes sent are the same as those of
the collectives. Enabled by `rules.overlap`: backends that run sends concurrently with matmuls (GPU, TPU) gain
if the matmuls are large; in all other cases it is slower.

Shapes, for n devices along the axis: `x` [batch, rows, ...] per device, gathered [batch, n * rows, ...].

Source: Overlap communication with dependent computation via decomposition (Wang et al., ASPLOS 2023), section
4.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from ..core.layout.layout import MeshAxes, current_layout
from .sharding_marks import ValueState, assert_sharding

Products = Sequence[Callable[[jax.Array], jax.Array]]


def should_overlap(axes: MeshAxes) -> bool:
    """Return True if collectives over `axes` are run as rings; only possible over a single mesh axis."""
    layout = current_layout()
    return layout is not None and layout.overlap and len(axes) == 1


def gather_matmul(x: jax.Array, axes: MeshAxes, products: Products) -> tuple[jax.Array, list[jax.Array]]:
    """Gather `x` along its second dimension and apply each matmul to the result.

    Args:
        products: Functions from rows of `x` to rows of the result, along the second dimension.

    Returns:
        The gathered `x`, and one result per function.
    """
    size, me = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    rows = x.shape[1]
    part, gathered, outs = x, None, None
    for step in range(size):
        # Send before multiplying, so that the two overlap.
        following = _sent(part, axes) if step < size - 1 else part
        # After `step` sends, this device holds the part of the device `step` places before it in the ring.
        at = (me - step) % size * rows
        # Every device ends up with the product of every part, so the results are whole.
        block_results = [
            part,
            *(product(assert_sharding(part, dict.fromkeys(axes, ValueState.WHOLE))) for product in products),
        ]
        if gathered is None or outs is None:
            gathered, *outs = [jnp.zeros((y.shape[0], y.shape[1] * size, *y.shape[2:]), y.dtype) for y in block_results]
        gathered, *outs = [
            jax.lax.dynamic_update_slice_in_dim(target, y, at, axis=1)
            for target, y in zip([gathered, *outs], block_results)
        ]
        part = following
    assert gathered is not None and outs is not None
    return assert_sharding(gathered, dict.fromkeys(axes, ValueState.WHOLE)), outs


def matmul_scatter(product: Callable[[jax.Array], jax.Array], axes: MeshAxes, rows: int) -> jax.Array:
    """Sum a matmul over `axes` and return this device's rows of the sum, along the second dimension.

    Args:
        product: Function from the first row of a part to this device's partial sum for that part.
        rows: Number of rows of each part.
    """
    size, me = jax.lax.axis_size(axes), jax.lax.axis_index(axes)
    # A running sum moves around the ring, and each device adds its term. It starts one device after the one
    # that keeps it, and arrives there after size - 1 sends.
    total = product((me - 1) % size * rows)
    for step in range(1, size):
        arriving = _sent(total, axes)
        total = arriving + product((me - 1 - step) % size * rows)
    return assert_sharding(total, dict.fromkeys(axes, ValueState.SPLIT), dim=1)


def slice_rows(x: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    """Return `rows` rows of the second dimension, from `start`."""
    return jax.lax.dynamic_slice_in_dim(x, start, rows, axis=1)


def _sent(x: jax.Array, axes: MeshAxes) -> jax.Array:
    size = jax.lax.axis_size(axes)
    return jax.lax.ppermute(x, axes[0], [(i, (i + 1) % size) for i in range(size)])
