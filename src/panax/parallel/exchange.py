"""Rows to the devices that hold their experts and back, over the expert axis.

Each device sorts its rows by expert: those for one device are then adjacent. All devices tell each other how many rows they
have for each expert (`Plan`), and from this each knows what it sends, what arrives and where. Buffers are of a fixed size and
loads are not: so rows travel in rounds, and each round takes a window of what goes from one device to another (`ExchangeWindow`):

- with a ragged exchange (GPU, TPU), whatever of a device's arrivals fits in its buffer: the bytes sent are the rows' own;
- elsewhere, an equal number for each pair of devices, padded.

There are as many rounds as it takes to deliver everything. Balanced loads take one; imbalance costs time, not memory or a token.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ..core.layout import MeshAxes
from ..spmd.collectives import axis_index
from ..spmd.marks import ValueState, assert_sharding
from .rows import RowMap, collect, spread


class ExchangeWindow(NamedTuple):
    """What travels in one round.

    Attributes:
        low: Of the rows for one device, in their order, the first that travels.
        high: One past the last.
        at: Where they arrive in the target's buffer.
    """

    low: Int[Array, "source target"]
    high: Int[Array, "source target"]
    at: Int[Array, "source target"]


class Arrivals(NamedTuple):
    """The rows of a buffer in the order of this device's experts.

    Attributes:
        counts: Rows for each of this device's experts.
        expert: Of each row of the buffer; the number of experts where there is no row.
        rank: Of each row among those for its expert.
    """

    counts: Int[Array, " expert"]
    expert: Int[Array, " row"]
    rank: Int[Array, " row"]


class Plan(NamedTuple):
    """How many rows each device has for each expert of each device, known to all of them."""

    counts: Int[Array, "source target expert"]

    @property
    def sent(self) -> Int[Array, "source target"]:
        return self.counts.sum(axis=2)

    @property
    def starts(self) -> Int[Array, "source target"]:
        """Where the rows for a target begin among a source's own."""
        return _before(self.sent, 1)


@dataclasses.dataclass(frozen=True)
class ExchangePlan:
    """The static half.

    Attributes:
        axes: The mesh axes that experts are split over.
        ways: How many devices that is.
        buffer: Rows that a device takes in at a time.
        ragged: Whether the backend sends what is there and no padding.
    """

    axes: MeshAxes
    ways: int
    buffer: int
    ragged: bool

    def plan(self, counts: Int[Array, " expert"]) -> Plan:
        """Tell all devices how many rows this one has for each expert."""
        counts = counts.astype(jnp.int32).reshape(1, self.ways, -1)
        return Plan(jax.lax.all_gather(counts, self.axes, axis=0, tiled=True))

    def rounds(self, plan: Plan) -> Int[Array, ""]:
        """How many it takes to deliver everything; the same number on all devices of the exchange."""
        most, room = (plan.sent.sum(axis=0), self.buffer) if self.ragged else (plan.sent, self._each)
        return -(-most.max() // room)

    def most_rounds(self, count: int) -> int:
        """How many it takes at worst, where each device has `count` rows: all of them for one device."""
        return -(-count * self.ways // self.buffer)

    def window(self, plan: Plan, number: Int[Array, ""]) -> ExchangeWindow:
        if not self.ragged:
            low = jnp.minimum(number * self._each, plan.sent)
            high = jnp.minimum(low + self._each, plan.sent)
            at = jnp.arange(self.ways, dtype=jnp.int32)[:, None] * self._each
            return ExchangeWindow(low, high, jnp.broadcast_to(at, low.shape))
        # A target's arrivals in the order of their sources; a round takes the next bufferful of them.
        first = _before(plan.sent, 0) - number * self.buffer
        low, high = jnp.clip(-first, 0, plan.sent), jnp.clip(self.buffer - first, 0, plan.sent)
        return ExchangeWindow(low, high, jnp.maximum(first + low, 0))

    def send(self, rows: Shaped[Array, "row ..."], plan: Plan, window: ExchangeWindow) -> Shaped[Array, "buffer ..."]:
        """A round's rows, of all devices to this one; what they don't fill is zeros."""
        if self.ragged:
            return _ragged(self.axes, self.buffer, True, rows, self._route(plan, window))
        return _all_to_all(self.axes, True, spread(rows, self._padded(plan, window, rows.shape[0])))

    def bring(
        self, buffer: Float[Array, "buffer ..."], plan: Plan, window: ExchangeWindow, count: int
    ) -> Float[Array, "row ..."]:
        """The transpose of `send`: a round's rows back to where they came from, `count` on this device; zeros for the others."""
        if self.ragged:
            return _ragged(self.axes, count, False, buffer, self._route(plan, window).reversed)
        return collect(_all_to_all(self.axes, False, buffer), self._padded(plan, window, count))

    def arrivals(self, plan: Plan, window: ExchangeWindow) -> Arrivals:
        """What a round brings to this device."""
        me = axis_index(self.axes)
        counts, low, high, at = plan.counts[:, me], window.low[:, me], window.high[:, me], window.at[:, me]
        experts = counts.shape[1]
        slot = jnp.arange(self.buffer, dtype=jnp.int32)
        # The last source whose rows begin here or before: those that send nothing begin where the next one does.
        source = (at[None, :] <= slot[:, None]).sum(axis=1, dtype=jnp.int32) - 1
        place = low[source] + slot - at[source]
        first = _before(counts, 1)
        expert = (first[source] + counts[source] <= place[:, None]).sum(axis=1, dtype=jnp.int32)
        expert = jnp.where(place < high[source], expert, experts)
        taken = jnp.maximum(jnp.minimum(first + counts, high[:, None]) - jnp.maximum(first, low[:, None]), 0)
        inside = jnp.minimum(expert, experts - 1)
        rank = _before(taken, 0)[source, inside] + place - jnp.maximum(first[source, inside], low[source])
        return Arrivals(taken.sum(axis=0), expert, rank)

    @property
    def _each(self) -> int:
        return self.buffer // self.ways

    def _padded(self, plan: Plan, window: ExchangeWindow, count: int) -> RowMap:
        """Which of this device's rows stand in an equal part of the buffer for each target."""
        me = axis_index(self.axes)
        starts, sent, low, high = plan.starts[me], plan.sent[me], window.low[me], window.high[me]
        place = jnp.arange(self._each, dtype=jnp.int32)[None, :] + low[:, None]
        row = jnp.where(place < high[:, None], starts[:, None] + place, count).reshape(-1)
        own = jnp.arange(count, dtype=jnp.int32)
        target = (starts[None, :] + sent[None, :] <= own[:, None]).sum(axis=1, dtype=jnp.int32)
        inside = jnp.minimum(target, self.ways - 1)
        place = own - starts[inside]
        travels = (target < self.ways) & (place >= low[inside]) & (place < high[inside])
        slot = jnp.where(travels, inside * self._each + place - low[inside], self.buffer)
        return RowMap(row, slot[:, None], count)

    def _route(self, plan: Plan, window: ExchangeWindow) -> "_Route":
        me = axis_index(self.axes)
        travels, starts = window.high - window.low, plan.starts + window.low
        return _Route(starts[me], travels[me], window.at[me], window.at[:, me], travels[:, me], starts[:, me])


class _Route(NamedTuple):
    """A ragged exchange as JAX takes it, and what its reverse needs besides."""

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
    """At its experts a row is nobody's part: sums over a device's rows are its experts' own. Back home it is a token's again."""
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
    """`count` rows, of which those that arrive are filled in."""
    # Tied to the rows: else compilers make the zeros of all exchanges at the start of a program, and keep them.
    x, zero = jax.lax.optimization_barrier((x, jnp.zeros((), x.dtype)))
    out = jnp.broadcast_to(zero, (count, *x.shape[1:]))
    rows = jax.lax.ragged_all_to_all(
        x, out, route.from_here, route.sizes_out, route.to_there, route.sizes_in, axis_name=axes
    )
    return _arrived(rows, axes, outward)


def _ragged_forward(axes: MeshAxes, count: int, outward: bool, x: jax.Array, route: _Route) -> tuple[jax.Array, tuple]:
    # Of `x` only the number of rows is needed: an array without elements has it.
    return _ragged(axes, count, outward, x, route), (route, jnp.zeros((x.shape[0], 0), bool))


def _ragged_backward(
    axes: MeshAxes, count: int, outward: bool, saved: tuple, gradient: jax.Array
) -> tuple[jax.Array, None]:
    route, rows = saved
    return _ragged(axes, rows.shape[0], not outward, gradient, route.reversed), None


_ragged.defvjp(_ragged_forward, _ragged_backward)


def _before(counts: jax.Array, axis: int) -> jax.Array:
    """The sum of all counts before each one."""
    return jnp.cumsum(counts, axis=axis, dtype=jnp.int32) - counts
