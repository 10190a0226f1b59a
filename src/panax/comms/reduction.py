"""A compressed sum over replicas, with error feedback.

    owed + gradient  ->  codes  --all-to-all-->  float32, added up by their owners  ->  codes  --all-gather-->  the sum

What travels are codes alone. A replica adds its own part of what it owns as it is, without rounding. What rounding leaves out is
kept in one array on each replica, which has two kinds of places: those that others own hold what was lost before the sum, and
those that it owns what was lost after it. Both are sent with the next step's gradient, so that over steps nothing is lost, and
arrays of replicas that merge are added up.

Source: arXiv:1901.09847 (error feedback), arXiv:2102.02888 (compression before and after the sum), with owners by place.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..core.layout import Layout
from ..core.protocols import Axes
from ..spmd.marks import ValueState, assert_sharding, split_over
from .rows import RowView
from .settings import Comms

BUCKET_BYTES = 4 * 2**20
"""Arrays travel together up to so many bytes in float32, so that small ones don't wait for one another."""


Owed = Mapping[str, Any] | None
"""By parameter, each replica's residual in float32, as `owed.residual_specs` lays it out; None without error feedback."""

Ways = Mapping[str, RowView]
"""How each array that travels compressed is cut, by its name."""


def ways_of(shards: Mapping[str, tuple[tuple[int, ...], Axes]], comms: Comms, layout: Layout) -> Ways:
    """The arrays that are large enough to travel compressed.

    Args:
        shards: By name the shape of a device's shard, and the logical axes.
    """
    owners = math.prod(layout.sizes[axis] for axis in comms.over)
    found = {name: RowView.of(name, shape, axes, layout, owners) for name, (shape, axes) in shards.items()}
    return {name: rows for name, rows in found.items() if rows is not None}


def reduce_compressed(
    terms: Mapping[str, jax.Array], ways: Ways, owed: Owed, comms: Comms, layout: Layout, count: jax.Array
) -> tuple[dict[str, jax.Array], Owed]:
    """The sums over the replicas, and what is owed now.

    To be called inside of a `shard_map` over all mesh axes.

    Args:
        terms: Of the sums, this device's, in its shards.
        owed: This device's, with dimensions of 1 in front.
        count: Of steps, for rounding by chance.
    """
    sums: dict[str, jax.Array] = {}
    after: dict[str, jax.Array] = {}
    for names in _buckets(ways):
        bucket = {
            name: GradientShare(
                ways[name], terms[name], None if owed is None else owed[name].reshape(terms[name].shape)
            )
            for name in names
        }
        for name, (value, left) in _summed(bucket, comms, layout, count).items():
            sums[name] = value
            if owed is not None and left is not None:
                after[name] = left.reshape(owed[name].shape)
    return sums, None if owed is None else after


class GradientShare(NamedTuple):
    """One gradient on one device: a replica's term of the sum, and what earlier steps have left out of it."""

    rows: RowView
    value: jax.Array
    owed: jax.Array | None


def _buckets(cut: Ways) -> list[list[str]]:
    """Names of what travels together: rows of one size, up to `BUCKET_BYTES`."""
    buckets: dict[int, list[list[str]]] = {}
    held: dict[int, int] = {}
    for name, rows in cut.items():
        size = 4 * math.prod(rows.shape)
        of_size = buckets.setdefault(rows.numbers, [])
        if not of_size or held[rows.numbers] + size > BUCKET_BYTES:
            of_size.append([])
            held[rows.numbers] = 0
        of_size[-1].append(name)
        held[rows.numbers] += size
    return [bucket for of_size in buckets.values() for bucket in of_size]


def _summed(
    bucket: Mapping[str, GradientShare], comms: Comms, layout: Layout, count: jax.Array
) -> dict[str, tuple[jax.Array, jax.Array | None]]:
    """Of each array the sum, and what is owed now."""
    wire, over = comms.wire, comms.over
    me = jax.lax.axis_index(over)
    by_chance = comms.rounding == "stochastic"
    own, sent, rests = {}, {}, {}
    for name, (rows, value, owed) in bucket.items():
        wide = assert_sharding(value.astype(jnp.float32), dict.fromkeys(over, ValueState.OWN))
        cut, bits = _split(rows.cut(wide), bucket), rows.bits("sent", count, me) if by_chance else None
        own[name] = _own(cut, me)
        if owed is None:
            sent[name] = wire.encode(cut, bits)
            continue
        before = _split(rows.cut(assert_sharding(owed, dict.fromkeys(over, ValueState.OWN))), bucket)
        # In one pass over both, where there is a kernel for that.
        sent[name], rests[name] = wire.encode_with_rest(cut, before, bits)
        own[name] = own[name] + _own(before, me)
    arrived = jax.tree.map(lambda x: jax.lax.all_to_all(x, over, 0, 0, tiled=True), _joined(list(sent.values())))
    terms = wire.decode(arrived)
    exact = _joined([own[name] for name in bucket], axis=0)
    mine = (jnp.arange(terms.shape[0]) == me)[:, None, None]
    total = _split(jnp.sum(jnp.where(mine, exact, terms), axis=0), bucket)
    bits = [_own(share.rows.bits("back", count), me) for share in bucket.values()] if by_chance else None
    back = wire.encode(total, None if bits is None else _joined(bits, axis=0))
    lost_after = total - wire.decode(back)
    whole = jax.tree.map(lambda part: jax.lax.all_gather(part, over, axis=0), back)
    found, start = {}, 0
    for name, (rows, value, owed) in bucket.items():
        here = slice(start, start + rows.count)
        start += rows.count
        summed = rows.joined(wire.decode(jax.tree.map(lambda x, here=here: x[:, here], whole)))
        left = None
        if owed is not None:
            # Of what it owns, a replica has sent nothing to itself, and lost what the sum has.
            lost = jnp.where(mine, lost_after[here], rests[name])
            left = assert_sharding(_lying(rows.joined(lost), rows, layout), dict.fromkeys(over, ValueState.OWN))
        found[name] = _lying(summed.astype(value.dtype), rows, layout), left
    return found


def _own(rows: jax.Array, me: jax.Array) -> jax.Array:
    """Of (owner, row, number) those of one owner."""
    return jax.lax.dynamic_index_in_dim(rows, me, axis=0, keepdims=False)


def _split(rows: jax.Array, bucket: Mapping[str, GradientShare]) -> jax.Array:
    """Rows, of which each device holds its own: what is summed within one is a whole sum."""
    axes = {axis for share in bucket.values() for dim in share.rows.places for axis in dim}
    return assert_sharding(rows, dict.fromkeys(axes, ValueState.SPLIT), rows.ndim - 2)


def _lying(value: jax.Array, rows: RowView, layout: Layout) -> jax.Array:
    """A sum, of which the check of a traced step can't follow that it lies as the array does."""
    split = {axis for axes in rows.places for axis in axes}
    return split_over(
        assert_sharding(value, {axis: ValueState.WHOLE for axis in layout.sizes if axis not in split}), rows.places
    )


def _joined(parts: Sequence[Any], axis: int = 1) -> Any:
    """Trees of one structure, put together along rows."""
    return jax.tree.map(lambda *each: jnp.concatenate(each, axis), *parts) if len(parts) > 1 else parts[0]
