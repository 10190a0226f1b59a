"""Execution of blocks that read other positions of a row on a mesh that shards rows: each device receives the
whole row.

A block written for one device is then correct on every mesh: the devices that share a row compute it
redundantly, and each keeps its positions of the result. The cost is memory for the gathered row and
duplicated work; a block written with `panax.spmd` shards both.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..core.layout.layout import Layout, current_layout, use_layout
from ..core.params.logical import Role, axis_for_role
from ..parallel.context import zigzag_inverse, zigzag_order, zigzag_parts
from ..spmd.collectives import all_gather, axis_index
from ..spmd.linear import all_gather_sum
from ..spmd.sharding_marks import ValueState, assert_cotangent_sharding
from .block import Block, Context


def run_block(
    block: Block, x: Float[Array, "batch residual embed"], context: Context, state: Any
) -> tuple[Float[Array, "batch residual embed"], Any]:
    """Run a block on the residual stream, gathered to whole rows if the block requires it."""
    layout = current_layout()
    if block.positions != "row" or layout is None:
        return block(x, context, state)
    (stream,), (row,) = (layout.compute((axis_for_role(role),)) for role in (Role.STREAM, Role.POSITIONS))
    if not stream:
        return block(x, context, state)
    length = x.shape[1]
    gathered = _in_order(all_gather_sum(x, stream, 1), layout)
    full_context = _whole_context(context, layout, stream, row, gathered.shape[1])
    with use_layout(layout.with_whole_rows()):
        y, report = block(gathered, full_context, state)
    # A device's cotangent is nonzero only at its own positions: a partial term of the sum over devices.
    y = assert_cotangent_sharding(y, dict.fromkeys(stream, ValueState.PARTIAL))
    if (parts := zigzag_parts(layout)) > 1:
        y = jnp.take(y, zigzag_order(y.shape[1], parts), axis=1)
    return jax.lax.dynamic_slice_in_dim(y, axis_index(stream) * length, length, axis=1), report


def _in_order(x: jax.Array, layout: Layout) -> jax.Array:
    """Restore the row's order of positions from the order of the context axis."""
    parts = zigzag_parts(layout)
    if parts == 1:
        return x
    return jnp.take(x, zigzag_inverse(x.shape[1], parts), axis=1)


def _whole_context(context: Context, layout: Layout, stream: Any, row: Any, length: int) -> Context:
    def gathered(leaf: Any, axes: Any) -> Any:
        return None if leaf is None else _in_order(all_gather(leaf, axes, 1), layout)

    return context._replace(
        position=gathered(context.position, row),
        segment=gathered(context.segment, row),
        times=gathered(context.times, row),
        target_times=gathered(context.target_times, row),
        valid=gathered(context.valid, stream),
        place=jnp.arange(length, dtype=jnp.int32),
    )
