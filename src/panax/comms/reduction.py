"""Compressed reduction over replicas, with error feedback.

    residual + gradient  ->  codes  --all-to-all-->  float32, summed by owners
                         ->  codes  --all-gather-->  the sum

Only codes are sent. A replica adds its own term of the rows that it owns exactly, without rounding. The
rounding error is stored in one residual per replica, which has two kinds of rows: those that other replicas
own hold the error before the sum, those that it owns the error after the sum. Both are sent with the next
step's gradient, so that nothing is lost over several steps, and the residuals of replicas that merge are
added.

Shapes, with a device's shard cut into rows (`rows.py`):

    term, residual    [owner, row, element]
    after all-to-all  [replica, row, element], the terms of the rows that this replica owns
    sum, new codes    [row, element]
    after all-gather  [owner, row, element]

Source: arXiv:1901.09847 (error feedback), arXiv:2102.02888 (compression before and after the sum). Differs:
owners are assigned by index.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core.layout.layout import Layout
from ..core.protocols import Axes
from ..spmd.sharding_marks import ValueState, assert_sharding, assert_split
from .rows import RowView
from .settings import Comms

BUCKET_BYTES = 4 * 2**20
"""Arrays are sent together up to this many bytes in float32, so that small ones do not wait for each other.
"""


Residuals = Mapping[str, Any] | None
"""Parameter name to each replica's residual in float32, sharded as in `owed.residual_specs`; None without
error feedback.
"""

RowViews = Mapping[str, RowView]
"""Name to row view of each array that is sent compressed."""


def compressed_views(shards: Mapping[str, tuple[tuple[int, ...], Axes]], comms: Comms, layout: Layout) -> RowViews:
    """Return the row views of arrays that are large enough to be compressed.

    Args:
        shards: Name to the shape of a device's shard and the logical axes.
    """
    owners = math.prod(layout.sizes[axis] for axis in comms.over)
    views = {name: RowView.of(name, shape, axes, layout, owners) for name, (shape, axes) in shards.items()}
    return {name: rows for name, rows in views.items() if rows is not None}


def reduce_compressed(
    terms: Mapping[str, jax.Array],
    views: RowViews,
    residuals: Residuals,
    comms: Comms,
    layout: Layout,
    count: jax.Array,
) -> tuple[dict[str, jax.Array], Residuals]:
    """Return the sums over the replicas, and the new residuals.

    It must be called inside a `shard_map` over all mesh axes.

    Args:
        terms: This device's terms of the sums, as local shards.
        views: Row view of each array.
        residuals: This device's residuals, with leading dimensions of 1.
        count: Step number, the seed of stochastic rounding.
    """
    sums: dict[str, jax.Array] = {}
    new_residuals: dict[str, jax.Array] = {}
    for names in _buckets(views):
        bucket = {
            name: GradientShare(
                views[name], terms[name], None if residuals is None else residuals[name].reshape(terms[name].shape)
            )
            for name in names
        }
        for name, (value, new_residual) in _reduce_bucket(bucket, comms, layout, count).items():
            sums[name] = value
            if residuals is not None and new_residual is not None:
                new_residuals[name] = new_residual.reshape(residuals[name].shape)
    return sums, None if residuals is None else new_residuals


class GradientShare(NamedTuple):
    """One gradient on one device: a replica's term of the sum, and its residual from earlier steps."""

    rows: RowView
    value: jax.Array
    residual: jax.Array | None


def _buckets(views: RowViews) -> list[list[str]]:
    """Group names of arrays that are sent together: equal row sizes, up to `BUCKET_BYTES`."""
    buckets: dict[int, list[list[str]]] = {}
    bucket_bytes: dict[int, int] = {}
    for name, rows in views.items():
        size = 4 * math.prod(rows.shape)
        same_row_length = buckets.setdefault(rows.row_length, [])
        if not same_row_length or bucket_bytes[rows.row_length] + size > BUCKET_BYTES:
            same_row_length.append([])
            bucket_bytes[rows.row_length] = 0
        same_row_length[-1].append(name)
        bucket_bytes[rows.row_length] += size
    return [bucket for same_row_length in buckets.values() for bucket in same_row_length]


def _reduce_bucket(
    bucket: Mapping[str, GradientShare], comms: Comms, layout: Layout, count: jax.Array
) -> dict[str, tuple[jax.Array, jax.Array | None]]:
    """Return the sum and the new residual of each array in a bucket."""
    wire, over = comms.wire, comms.over
    me = jax.lax.axis_index(over)
    by_chance = comms.rounds_at_random
    own_terms, sent, sent_errors = {}, {}, {}
    for name, (rows, value, residual) in bucket.items():
        wide = assert_sharding(value.astype(jnp.float32), dict.fromkeys(over, ValueState.OWN))
        rows_to_send, bits = (
            _assert_split(rows.to_rows(wide), bucket),
            rows.random_bits("sent", count, me) if by_chance else None,
        )
        own_terms[name] = _select_owner(rows_to_send, me)
        if residual is None:
            sent[name] = wire.encode(rows_to_send, bits)
            continue
        before = _assert_split(rows.to_rows(assert_sharding(residual, dict.fromkeys(over, ValueState.OWN))), bucket)
        # In one pass over both, if there is a kernel for it.
        sent[name], sent_errors[name] = wire.encode_with_residual(rows_to_send, before, bits)
        own_terms[name] = own_terms[name] + _select_owner(before, me)
    # Send each owner its rows, and sum the terms that arrive; this replica's own term is used exactly.
    arrived = jax.tree.map(lambda x: jax.lax.all_to_all(x, over, 0, 0, tiled=True), _concatenate(list(sent.values())))
    terms = wire.decode(arrived)
    exact = _concatenate([own_terms[name] for name in bucket], axis=0)
    is_own = (jnp.arange(terms.shape[0]) == me)[:, None, None]
    total = _assert_split(jnp.sum(jnp.where(is_own, exact, terms), axis=0), bucket)
    # Encode the sums, gather them from all owners, and cut the bucket into its arrays again.
    bits = (
        [_select_owner(share.rows.random_bits("back", count), me) for share in bucket.values()] if by_chance else None
    )
    encoded_sums = wire.encode(total, None if bits is None else _concatenate(bits, axis=0))
    sum_errors = total - wire.decode(encoded_sums)
    gathered = jax.tree.map(lambda part: jax.lax.all_gather(part, over, axis=0), encoded_sums)
    results, start = {}, 0
    for name, (rows, value, residual) in bucket.items():
        owned_rows = slice(start, start + rows.rows_per_owner)
        start += rows.rows_per_owner
        summed = rows.from_rows(wire.decode(jax.tree.map(lambda x, owned_rows=owned_rows: x[:, owned_rows], gathered)))
        new_residual = None
        if residual is not None:
            # In the rows that it owns, a replica lost nothing before the sum, only after it.
            errors = jnp.where(is_own, sum_errors[owned_rows], sent_errors[name])
            new_residual = assert_sharding(
                _assert_sharded_like(rows.from_rows(errors), rows, layout), dict.fromkeys(over, ValueState.OWN)
            )
        results[name] = _assert_sharded_like(summed.astype(value.dtype), rows, layout), new_residual
    return results


def _select_owner(rows: jax.Array, me: jax.Array) -> jax.Array:
    """Select one owner's rows, from [owner, row, element] to [row, element]."""
    return jax.lax.dynamic_index_in_dim(rows, me, axis=0, keepdims=False)


def _assert_split(rows: jax.Array, bucket: Mapping[str, GradientShare]) -> jax.Array:
    """Assert that rows are split over devices, so that a sum within a row is a complete sum."""
    axes = {axis for share in bucket.values() for dim in share.rows.dim_axes for axis in dim}
    return assert_sharding(rows, dict.fromkeys(axes, ValueState.SPLIT), rows.ndim - 2)


def _assert_sharded_like(value: jax.Array, rows: RowView, layout: Layout) -> jax.Array:
    """Assert that a sum is sharded like its array, which the sharding check cannot infer."""
    split = {axis for axes in rows.dim_axes for axis in axes}
    return assert_split(
        assert_sharding(value, {axis: ValueState.WHOLE for axis in layout.sizes if axis not in split}), rows.dim_axes
    )


def _concatenate(parts: Sequence[Any], axis: int = 1) -> Any:
    """Concatenate trees of the same structure along rows."""
    return jax.tree.map(lambda *each: jnp.concatenate(each, axis), *parts) if len(parts) > 1 else parts[0]
