"""Sums over the segments of packed rows, of which each device may hold any positions.

A segment's slot is its index among all segments that the rows of a (micro-)batch could have:

    slot = row * segments per row + segment - 1

A context axis, and a pipeline's stages, split the positions of a row: sums over them are made whole. A value that counts
each segment once, such as a loss per segment, is added by the device with the segment's first position (`starts`), so that its
terms are partial sums over devices like those of positions.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...core import Batch, current_layout, current_target
from ...core.layout.layout import MeshAxes, axis_size
from ...core.layout.target import Target
from ...core.params.logical import Role, axis_for_role
from ...layers.stages.staged_task import STAGE
from ...spmd import ValueState, assert_sharding, token_axes
from ...spmd.collectives import all_reduce
from ...spmd.segments import segment_sums


class SegmentSlots(NamedTuple):
    """The slots of this device's positions.

    Attributes:
        slot: Slot of each position's segment; that of padding is outside of all rows.
        starts: 1 for the first position of each segment, else 0.
        stray: 1 for positions of segments that a row has no room for, else 0.
    """

    slot: Int[Array, "batch seq"]
    starts: Float[Array, "batch seq"]
    stray: Float[Array, "batch seq"]


def segments_per_row(batch: Batch) -> int:
    """Return the number of segments that a row could have: an even number, one per position."""
    length = batch["segment"].shape[-1] * axis_size("context")
    return length - length % 2


def find_slots(batch: Batch) -> SegmentSlots:
    """Find the slot of each position; segments are numbered from 1 in each row, with positions that restart at 0."""
    segment, width = batch["segment"], segments_per_row(batch)
    row = jnp.arange(segment.shape[0], dtype=jnp.int32)[:, None]
    slot = jnp.where(is_in_segment(batch), row * width + segment - 1, -1)
    stray = (is_in_segment(batch) != (segment > 0)).astype(jnp.float32)
    return SegmentSlots(slot, find_starts(batch), stray)


def is_in_segment(batch: Batch) -> Bool[Array, "... batch seq"]:
    """Return False for padding, and for segments that no row has room for."""
    return (batch["segment"] > 0) & (batch["segment"] <= segments_per_row(batch))


def find_starts(batch: Batch) -> Float[Array, "... batch seq"]:
    """Return 1 for the first position of each segment, else 0."""
    return (is_in_segment(batch) & (batch["position"] == 0)).astype(jnp.float32)


def sum_own_positions(
    values: Float[Array, "batch seq width"], slot: Int[Array, "batch seq"]
) -> Float[Array, "slot width"]:
    """Sum the values of each segment's positions on this device; not differentiated."""
    return _sum_by_slot(jax.lax.stop_gradient(values), slot, _count_slots(slot), current_target())


def sum_segments(values: Float[Array, "batch seq width"], slot: Int[Array, "batch seq"]) -> Float[Array, "slot width"]:
    """Sum the values of each segment's positions on all devices; the same on all devices that have a part of the row.

    The cotangents, partial on each of these devices, are summed too.
    """
    return _total(values, slot, _count_slots(slot), row_axes(), current_target())


def expand_sums(sums: Float[Array, "slot width"], slot: Int[Array, "batch seq"]) -> Float[Array, "batch seq width"]:
    """Return each position's row of `sum_segments`, that of its segment; 0 for padding."""
    return sums.at[jnp.where(slot < 0, sums.shape[0], slot)].get(mode="fill", fill_value=0.0)


def _count_slots(slot: Int[Array, "batch seq"]) -> int:
    """Return an upper bound of the slots, even and static: the positions that all devices hold of these rows."""
    size = slot.size * axis_size("context") * axis_size(STAGE)
    return size + size % 2


def row_axes() -> MeshAxes:
    """Return the mesh axes that split the positions of a row."""
    layout = current_layout()
    if layout is None:
        return ()
    positions = layout.compute((axis_for_role(Role.POSITIONS),))[0]
    return tuple(axis for axis in token_axes() if axis in positions or axis == STAGE)


def _sum_by_slot(values: jax.Array, slot: jax.Array, count: int, target: Target) -> jax.Array:
    # A negative index would count from the end.
    flat = jnp.where(slot < 0, count, slot).reshape(-1)
    sums = segment_sums(values.reshape(-1, values.shape[-1]), flat, count, target=target)
    axes = row_axes()
    rows = {axis: ValueState.SPLIT for axis in token_axes() if axis not in axes}
    return assert_sharding(sums, rows | dict.fromkeys(axes, ValueState.PARTIAL))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _total(values: jax.Array, slot: jax.Array, count: int, axes: MeshAxes, target: Target) -> jax.Array:
    return all_reduce(_sum_by_slot(values, slot, count, target), axes)


def _forward(values: jax.Array, slot: jax.Array, count: int, axes: MeshAxes, target: Target):
    return _total(values, slot, count, axes, target), slot


def _backward(count: int, axes: MeshAxes, target: Target, slot: jax.Array, gradient: jax.Array):
    whole = all_reduce(gradient, axes)
    d_values = whole.at[jnp.where(slot < 0, count, slot)].get(mode="fill", fill_value=0)
    return assert_sharding(d_values, dict.fromkeys(token_axes(), ValueState.SPLIT), dim=1), None


_total.defvjp(_forward, _backward)
