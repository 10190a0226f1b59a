"""Exchange of rows with the devices that hold their experts, over the expert axis.

Each device sorts its rows by expert, so that those for one device are adjacent. All devices all-gather their
row counts per expert (`RoutingCounts`), from which each computes what it sends, what arrives and where. Buffers have a
fixed size but loads vary, so rows travel in rounds; each round takes a window of the rows from each device to
each other (`ExchangeWindow`):

- with a ragged exchange (GPU, TPU), as many of a device's arrivals as fit its buffer: only the rows' bytes
  are sent;
- elsewhere, an equal number for each pair of devices, padded.

The number of rounds is what it takes to deliver everything. Balanced loads take one; imbalance costs time,
but neither memory nor dropped tokens.

Legend: "source target" arrays are indexed by (sending device, receiving device); `row` indexes this device's
sorted rows, `buffer` the slots of the receive buffer.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ..core.layout.layout import MeshAxes
from ..spmd.collectives import axis_index
from ..spmd.sharding_marks import ValueState, assert_sharding
from .rows import RowMap, copy_to_rows, sum_by_token


class ExchangeWindow(NamedTuple):
    """The rows that travel in one round.

    Attributes:
        low: For each source, the first of its rows for the target that travels, counted among those rows.
        high: One past the last of these rows.
        at: First slot of these rows in the target's buffer.
    """

    low: Int[Array, "source target"]
    high: Int[Array, "source target"]
    at: Int[Array, "source target"]


class Arrivals(NamedTuple):
    """The rows of a buffer, described by this device's experts.

    Attributes:
        counts: Number of rows for each of this device's experts.
        expert: Expert of each buffer row; the number of experts for an empty slot.
        rank: Index of each row among those for its expert.
    """

    counts: Int[Array, " expert"]
    expert: Int[Array, " row"]
    rank: Int[Array, " row"]


class RoutingCounts(NamedTuple):
    """Number of rows of each device for each expert of each device; the same array on all devices."""

    counts: Int[Array, "source target expert"]

    @property
    def sent(self) -> Int[Array, "source target"]:
        return self.counts.sum(axis=2)

    @property
    def starts(self) -> Int[Array, "source target"]:
        """First row for a target among a source's rows."""
        return _exclusive_cumsum(self.sent, 1)


@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """Static configuration of an exchange.

    Attributes:
        axes: The mesh axes that shard experts.
        ways: Number of devices along them.
        buffer: Number of rows that a device receives per round.
        ragged: True if the backend sends rows without padding.
    """

    axes: MeshAxes
    ways: int
    buffer: int
    ragged: bool

    def plan(self, counts: Int[Array, " expert"]) -> RoutingCounts:
        """All-gather the number of rows that each device has for each expert."""
        counts = counts.astype(jnp.int32).reshape(1, self.ways, -1)
        return RoutingCounts(jax.lax.all_gather(counts, self.axes, axis=0, tiled=True))

    def rounds(self, plan: RoutingCounts) -> Int[Array, ""]:
        """Return the number of rounds that deliver everything; the same on all devices of the exchange."""
        most, room = (plan.sent.sum(axis=0), self.buffer) if self.ragged else (plan.sent, self._each)
        return -(-most.max() // room)

    def max_rounds(self, count: int) -> int:
        """Return the maximum number of rounds if each device has `count` rows: all of them for one device."""
        return -(-count * self.ways // self.buffer)

    def window(self, plan: RoutingCounts, number: Int[Array, ""]) -> ExchangeWindow:
        if not self.ragged:
            low = jnp.minimum(number * self._each, plan.sent)
            high = jnp.minimum(low + self._each, plan.sent)
            at = jnp.arange(self.ways, dtype=jnp.int32)[:, None] * self._each
            return ExchangeWindow(low, high, jnp.broadcast_to(at, low.shape))
        # Order a target's arrivals by source; each round takes the next `buffer` of them.
        first = _exclusive_cumsum(plan.sent, 0) - number * self.buffer
        low, high = jnp.clip(-first, 0, plan.sent), jnp.clip(self.buffer - first, 0, plan.sent)
        return ExchangeWindow(low, high, jnp.maximum(first + low, 0))

    def send(
        self, rows: Shaped[Array, "row ..."], plan: RoutingCounts, window: ExchangeWindow
    ) -> Shaped[Array, "buffer ..."]:
        """Send a round's rows; return those for this device, with zeros in empty slots."""
        if self.ragged:
            return _ragged(self.axes, self.buffer, True, rows, self._route(plan, window))
        return _all_to_all(self.axes, True, copy_to_rows(rows, self._padded(plan, window, rows.shape[0])))

    def send_back(
        self, buffer: Float[Array, "buffer ..."], plan: RoutingCounts, window: ExchangeWindow, count: int
    ) -> Float[Array, "row ..."]:
        """Return a round's rows to their sources, as the transpose of `send`: `count` rows on this device,
        zeros for other rounds' rows."""
        if self.ragged:
            return _ragged(self.axes, count, False, buffer, self._route(plan, window).reversed)
        return sum_by_token(_all_to_all(self.axes, False, buffer), self._padded(plan, window, count))

    def arrivals(self, plan: RoutingCounts, window: ExchangeWindow) -> Arrivals:
        """Describe the rows that a round brings to this device."""
        me = axis_index(self.axes)
        counts, low, high, at = plan.counts[:, me], window.low[:, me], window.high[:, me], window.at[:, me]
        experts = counts.shape[1]
        slot = jnp.arange(self.buffer, dtype=jnp.int32)
        # The last source that starts at or before this slot; one that sends nothing starts where the next one does.
        source = (at[None, :] <= slot[:, None]).sum(axis=1, dtype=jnp.int32) - 1
        place = low[source] + slot - at[source]
        first = _exclusive_cumsum(counts, 1)
        expert = (first[source] + counts[source] <= place[:, None]).sum(axis=1, dtype=jnp.int32)
        expert = jnp.where(place < high[source], expert, experts)
        # window_counts: [source, expert], rows of each expert inside this round's window.
        window_counts = jnp.maximum(jnp.minimum(first + counts, high[:, None]) - jnp.maximum(first, low[:, None]), 0)
        inside = jnp.minimum(expert, experts - 1)
        rank = (
            _exclusive_cumsum(window_counts, 0)[source, inside]
            + place
            - jnp.maximum(first[source, inside], low[source])
        )
        return Arrivals(window_counts.sum(axis=0), expert, rank)

    @property
    def _each(self) -> int:
        return self.buffer // self.ways

    def _padded(self, plan: RoutingCounts, window: ExchangeWindow, count: int) -> RowMap:
        """Map this device's rows to equal parts of the buffer, one per target."""
        me = axis_index(self.axes)
        starts, sent, low, high = plan.starts[me], plan.sent[me], window.low[me], window.high[me]
        place = jnp.arange(self._each, dtype=jnp.int32)[None, :] + low[:, None]
        row = jnp.where(place < high[:, None], starts[:, None] + place, count).reshape(-1)
        local_rows = jnp.arange(count, dtype=jnp.int32)
        target = (starts[None, :] + sent[None, :] <= local_rows[:, None]).sum(axis=1, dtype=jnp.int32)
        inside = jnp.minimum(target, self.ways - 1)
        place = local_rows - starts[inside]
        travels = (target < self.ways) & (place >= low[inside]) & (place < high[inside])
        slot = jnp.where(travels, inside * self._each + place - low[inside], self.buffer)
        return RowMap(row, slot[:, None], count)

    def _route(self, plan: RoutingCounts, window: ExchangeWindow) -> "_Route":
        me = axis_index(self.axes)
        travels, starts = window.high - window.low, plan.starts + window.low
        return _Route(starts[me], travels[me], window.at[me], window.at[:, me], travels[:, me], starts[:, me])


class _Route(NamedTuple):
    """Arguments of JAX's ragged all-to-all, and of its reverse."""

    from_here: Int[Array, " device"]
    sizes_out: Int[Array, " device"]
    to_there: Int[Array, " device"]
    to_here: Int[Array, " device"]
    sizes_in: Int[Array, " device"]
    from_there: Int[Array, " device"]

    @property
    def reversed(self) -> "_Route":
        return _Route(self.to_here, self.sizes_in, self.from_there, self.from_here, self.sizes_out, self.to_there)


def _arrived(rows: jax.Array, axes: MeshAxes, outward: bool) -> jax.Array:
    """Assert the sharding of arrived rows: at the experts, sums over a device's rows are final; back home,
    rows are the tokens' again."""
    return assert_sharding(rows, dict.fromkeys(axes, ValueState.OWN if outward else ValueState.SPLIT))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_to_all(axes: MeshAxes, outward: bool, x: jax.Array) -> jax.Array:
    return _arrived(jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True), axes, outward)


_all_to_all.defvjp(
    lambda axes, outward, x: (_all_to_all(axes, outward, x), None),
    lambda axes, outward, _, gradient: (_all_to_all(axes, not outward, gradient),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _ragged(axes: MeshAxes, count: int, outward: bool, x: jax.Array, route: _Route) -> jax.Array:
    """Exchange rows into a buffer of `count` rows; slots without an arrival are zero."""
    # Tie the zeros to the rows: otherwise compilers create those of all exchanges at the start and keep them.
    x, zero = jax.lax.optimization_barrier((x, jnp.zeros((), x.dtype)))
    out = jnp.broadcast_to(zero, (count, *x.shape[1:]))
    rows = jax.lax.ragged_all_to_all(
        x, out, route.from_here, route.sizes_out, route.to_there, route.sizes_in, axis_name=axes
    )
    return _arrived(rows, axes, outward)


def _ragged_forward(axes: MeshAxes, count: int, outward: bool, x: jax.Array, route: _Route) -> tuple[jax.Array, tuple]:
    # Only the number of rows of `x` is needed; an array without elements carries it.
    return _ragged(axes, count, outward, x, route), (route, jnp.zeros((x.shape[0], 0), bool))


def _ragged_backward(
    axes: MeshAxes, count: int, outward: bool, saved: tuple, gradient: jax.Array
) -> tuple[jax.Array, None]:
    route, rows = saved
    return _ragged(axes, rows.shape[0], not outward, gradient, route.reversed), None


_ragged.defvjp(_ragged_forward, _ragged_backward)


def _exclusive_cumsum(counts: jax.Array, axis: int) -> jax.Array:
    """Compute the exclusive cumulative sum."""
    return jnp.cumsum(counts, axis=axis, dtype=jnp.int32) - counts
