"""Exchange of table rows with the devices that read them, and of their gradients with the devices that hold
them.

Each device requests distinct rows in ascending order, so that those of one owner are adjacent, and so are
those of any range of an owner's rows. Buffers have a fixed size. One round therefore transfers a range of
each owner's rows, as wide as fits: a sender knows where the range begins and ends among its rows, and all
gradients of a row arrive in the same round, to be summed before an optimizer sees them. If all rows fit, as
they do unless the ids of many devices concentrate on one owner, there is one round; otherwise an owner finds
the end of its range by bisection. No id is ever dropped.

Legend: "source" is a device that requests rows, "target" their owner; row numbers are global unless said to
be in a shard.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core.layout.declarations import declare_trip_count, tag_comm
from ..core.layout.layout import MeshAxes, current_target
from ..spmd.collectives import all_gather, all_reduce, axis_index, reduce_scatter
from ..spmd.row_gradients import Change, RowGradients, merge_rows, update_rows
from ..spmd.rows import GatheredRows, unique_rows
from ..spmd.sharding_marks import ValueState, assert_sharding, assert_split
from .exchange import ExchangePlan, ExchangeWindow, RoutingCounts
from .row_placement import TablePlacement

SPARE = 1.25
"""Size of a device's buffer relative to the distinct rows it may request: headroom for owners with more
requests."""


class RowRequest(NamedTuple):
    """A device's requests, and what the first round transfers.

    Attributes:
        row_ids: Requested row numbers, ascending, padded with the table's number of rows.
        plan: Number of rows that each device requests from each.
        first: The first round.
        arrived_row_ids: Row numbers in this device's shard that the first round requests; padded with the shard's
            number of rows.
    """

    row_ids: Int[Array, " requested"]
    plan: RoutingCounts
    first: "ExchangeRound"
    arrived_row_ids: Int[Array, " buffer"]


class ExchangeRound(NamedTuple):
    """A round: a range of each owner's rows.

    Attributes:
        low: For each device and owner, the number of requested rows before this round.
        high: The same number after this round.
        bound: For each owner's shard, the first row after the range.
    """

    low: Int[Array, "source target"]
    high: Int[Array, "source target"]
    bound: Int[Array, " target"]


@dataclasses.dataclass(frozen=True)
class RowExchange:
    """Static configuration of a table's exchange.

    Attributes:
        count: Rows of the whole table.
        shard_rows: Rows of a shard.
        distinct: Maximum number of distinct rows that a device needs.
        requested: Maximum number of rows that a device requests: devices that need the same rows request a part
            each.
    """

    placement: TablePlacement
    count: int
    shard_rows: int
    distinct: int
    requested: int
    exchange: ExchangePlan

    @classmethod
    def of(cls, placement: TablePlacement, shard: tuple[int, ...], ids: int) -> "RowExchange":
        """Size the exchange.

        Args:
            shard: Shape of a device's shard of the table.
            ids: Number of ids that a device reads.
        """
        distinct = min(ids, shard[0] * jax.lax.axis_size(placement.rows))
        return cls.of_sizes(placement, shard, distinct, -(-distinct // _size(placement.request_axes)))

    @classmethod
    def of_sizes(
        cls, placement: TablePlacement, shard: tuple[int, ...], distinct: int, requested: int
    ) -> "RowExchange":
        """Size the exchange for devices that need `distinct` rows and request `requested` of them."""
        ways = jax.lax.axis_size(placement.rows)
        buffer = -(-math.ceil(SPARE * requested) // ways) * ways
        exchange = ExchangePlan(placement.rows, ways, buffer, ragged=current_target().traits.ragged_exchange)
        return cls(placement, shard[0] * ways, shard[0], distinct, requested, exchange)

    def gather(self, table: Float[Array, "row row_width"], ids: Int[Array, " ids"]) -> tuple[GatheredRows, RowRequest]:
        """Read the distinct rows of the given ids (-1 for none); also return the request, which
        `return_gradients` needs.

        Args:
            table: This device's shard.
        """
        numbers = unique_rows(ids, self.count, self.distinct)
        parts = _size(self.placement.request_axes)
        padded = jnp.pad(numbers, (0, self.requested * parts - numbers.shape[0]), constant_values=self.count)
        # Stride over the parts, so that each part has rows of all owners.
        local_ids = padded.reshape(self.requested, parts)[:, axis_index(self.placement.request_axes)]
        local_ids = assert_sharding(local_ids, dict.fromkeys(self.placement.rows, ValueState.OWN))
        request = self._request(local_ids)

        def brought(round_: ExchangeRound, arrived: jax.Array) -> jax.Array:
            with tag_comm("rows of tables"):
                rows = table.at[arrived].get(mode="clip")
                return self.exchange.send_back(rows, request.plan, self._window(round_), self.requested)

        first = brought(request.first, request.arrived_row_ids)
        rows = self._later(request, first, lambda total, round_, arrived: total + brought(round_, arrived))
        part = assert_sharding(rows[:, None], dict.fromkeys(self.placement.request_axes, ValueState.SPLIT), 1)
        with tag_comm("rows of tables"):
            together = all_gather(part, self.placement.request_axes, 1).reshape(self.requested * parts, -1)
            full_rows = all_gather(assert_split(together, ((), self.placement.columns)), self.placement.columns, 1)
        return GatheredRows(numbers, full_rows[: numbers.shape[0]], self.count), request

    def return_gradients(self, gradients: Float[Array, "distinct row_width"], request: RowRequest) -> RowGradients:
        """Compute the gradients of the rows that this device holds, from those of the rows that it
        requested."""
        parts = _size(self.placement.request_axes)
        with tag_comm("gradients of tables"):
            shard = reduce_scatter(all_reduce(gradients, self.placement.sum_axes), self.placement.columns, 1)
            shard = jnp.pad(shard, ((0, self.requested * parts - shard.shape[0]), (0, 0)))
            shard = reduce_scatter(shard.reshape(self.requested, parts, -1), self.placement.request_axes, 1)[:, 0]
        shard = assert_sharding(shard, dict.fromkeys(self.placement.rows, ValueState.OWN))
        numbers, values = self._summed(shard, request, request.first, request.arrived_row_ids)

        def square(total: jax.Array, round_: ExchangeRound, arrived: jax.Array) -> jax.Array:
            return total + jnp.square(self._summed(shard, request, round_, arrived)[1]).sum()

        later = self._later(request, jnp.float32(0.0), square)
        later = jax.lax.psum(later, (*self.placement.rows, *self.placement.columns))
        return RowGradients(numbers, values, (request.row_ids, shard), later)

    def update(
        self, table: jax.Array, state: Any, gradients: RowGradients, change: Change, applied: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Update this device's shard and the state of its rows; nothing changes unless `applied`."""
        assert gradients.later is not None
        numbers, shard = gradients.later
        done = update_rows(table, state, gradients.row_ids, gradients.values, change, applied)

        def more(before: tuple[jax.Array, Any], round_: ExchangeRound, arrived: jax.Array) -> tuple[jax.Array, Any]:
            return update_rows(*before, *self._summed(shard, request, round_, arrived), change, applied)

        request = self._request(numbers, arrives=False)
        return self._later(request, done, more)

    def _summed(
        self, gradients: jax.Array, request: RowRequest, round_: ExchangeRound, arrived: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return (row numbers in the shard, gradients) of a round, each row once, summed over all
        replicas."""
        with tag_comm("gradients of tables"):
            values = self.exchange.send(gradients, request.plan, self._window(round_))
            values = all_gather(values, self.placement.reduce_axes, 0)
            arrived = all_gather(arrived, self.placement.reduce_axes, 0)
        return merge_rows(arrived, values, self.shard_rows)

    def _request(self, numbers: jax.Array, *, arrives: bool = True) -> RowRequest:
        owner = jnp.arange(self.exchange.ways + 1, dtype=jnp.int32) * self.shard_rows
        starts = jnp.searchsorted(numbers, owner).astype(jnp.int32)
        with tag_comm("numbers of rows"):
            plan = self.exchange.plan(starts[1:] - starts[:-1])
        none = jnp.zeros_like(plan.sent)
        first = self._next(numbers, plan, ExchangeRound(none, none, jnp.zeros(self.exchange.ways, jnp.int32)))
        nothing = jnp.full(self.exchange.buffer, self.shard_rows, jnp.int32)
        return RowRequest(numbers, plan, first, self._arrived(numbers, plan, first) if arrives else nothing)

    def _arrived(self, numbers: jax.Array, plan: RoutingCounts, round_: ExchangeRound) -> jax.Array:
        with tag_comm("numbers of rows"):
            # Count from 1: empty slots arrive as zeros.
            sent = self.exchange.send(numbers % self.shard_rows + 1, plan, self._window(round_))
        return jnp.where(sent > 0, sent - 1, self.shard_rows)

    def _window(self, round_: ExchangeRound) -> ExchangeWindow:
        travels = round_.high - round_.low
        if self.exchange.ragged:
            return ExchangeWindow(round_.low, round_.high, jnp.cumsum(travels, axis=0, dtype=jnp.int32) - travels)
        at = jnp.arange(self.exchange.ways, dtype=jnp.int32)[:, None] * (self.exchange.buffer // self.exchange.ways)
        return ExchangeWindow(round_.low, round_.high, jnp.broadcast_to(at, travels.shape))

    def _next(self, numbers: jax.Array, plan: RoutingCounts, before: ExchangeRound) -> ExchangeRound:
        """Find the widest ranges of rows that fit, after those already transferred."""
        ways, me = self.exchange.ways, axis_index(self.placement.rows)
        low, starts = before.high, plan.starts[me]
        first = jnp.arange(ways, dtype=jnp.int32) * self.shard_rows

        def fits(cut: jax.Array) -> jax.Array:
            """Return for each owner whether the requested rows in the range fit the buffers of all replicas;
            `cut` is this device's."""
            count = cut - low[me]
            if self.exchange.ragged:
                count, room = jax.lax.psum(count, self.placement.rows), self.exchange.buffer
            else:
                count, room = jax.lax.pmax(count, self.placement.rows), self.exchange.buffer // ways
            return (jax.lax.pmax(count, self.placement.reduce_axes) if self.placement.reduce_axes else count) <= room

        def halved(_: jax.Array, between: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            below, above = between
            middle = below + (above - below) // 2
            good = fits(jnp.searchsorted(numbers, first + middle).astype(jnp.int32) - starts)
            return jnp.where(good, middle, below), jnp.where(good, above, middle)

        # Bisect each owner's bound in parallel; skip the loop if everything fits.
        full_bound = jnp.full(ways, self.shard_rows, jnp.int32)
        all_fit = fits(plan.sent[me])
        halvings = jnp.where(all_fit.all(), 0, max(1, self.shard_rows).bit_length())
        with tag_comm("ranges of rows"), declare_trip_count(0, max(1, self.shard_rows).bit_length()):
            bound = jax.lax.fori_loop(0, halvings, halved, (before.bound, full_bound))[0]
        bound = jnp.where(all_fit, full_bound, bound)
        cut = jnp.searchsorted(numbers, first + bound).astype(jnp.int32) - starts
        with tag_comm("numbers of rows"):
            return ExchangeRound(low, all_gather(cut[None], self.placement.rows, 0), bound)

    def _later(self, request: RowRequest, first: Any, more: Callable[[Any, ExchangeRound, jax.Array], Any]) -> Any:
        """Fold `more` over the rounds after the first; there are none if all rows fit in one."""

        def has_more(carry: tuple[ExchangeRound, Any]) -> jax.Array:
            waits = (carry[0].bound < self.shard_rows).any()
            return waits

        def turn(carry: tuple[ExchangeRound, Any]) -> tuple[ExchangeRound, Any]:
            round_ = self._next(request.row_ids, request.plan, carry[0])
            return round_, more(carry[1], round_, self._arrived(request.row_ids, request.plan, round_))

        with declare_trip_count(0, self.exchange.max_rounds(self.requested) - 1):
            return jax.lax.while_loop(has_more, turn, (request.first, first))[1]


def _size(axes: MeshAxes) -> int:
    return jax.lax.axis_size(axes) if axes else 1
