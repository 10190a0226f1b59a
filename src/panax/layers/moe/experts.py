"""Experts: many small feed-forward layers, each applied to the tokens routed to it, by grouped matmuls.

No token is dropped or padded to a capacity: rows are sorted by expert, whatever the load. Along the mesh's
expert axis, rows travel to the devices that hold their experts (`parallel/exchange.py`). If experts are also
sharded over the tensor axis, those devices gather their tokens first, and each adds its partial result.

Shapes: `token` = batch x seq of this device; `assignment` = (token, expert) pairs, padding included; `row` =
rows of a buffer sorted by expert, each expert's rows starting at a multiple of `tile`.

Sources: MegaBlocks (arXiv:2211.15841) for computing without capacity, GShard (arXiv:2006.16668) for the
expert axis.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from ...core import Module, Target, current_layout, current_target, normal, parameter
from ...core.layout.layout import MeshAxes
from ...kernels.grouped.feed_forward import FeedForwardMatrices, chunked_feed_forward, chunked_feed_forward_gradients
from ...kernels.grouped.grouped_matmul import (
    Groups,
    aligned_row_count,
    choose_tile,
    grouped_outer,
    grouped_product,
    is_blocked,
)
from ...kernels.product import materialize
from ...parallel.exchange import ExchangePlan, RoutingCounts
from ...parallel.remat import EXCHANGED_ROWS
from ...parallel.rounds import sum_over_rounds
from ...parallel.rows import RowMap, copy_to_rows, sum_by_token
from ...spmd import (
    GatheredWeight,
    ValueState,
    WeightOp,
    all_gather_sequence,
    apply_weight_op,
    assert_sharding,
    contract,
    gather_weight,
    reduce_scatter_sequence,
    sequence_parallel_axes,
)
from ...spmd.collectives import all_gather, axis_index
from ...spmd.contraction import PRODUCT
from ...spmd.linear import all_gather_sum, psum_both, reduce_scatter_sum
from ..feed_forward import ACTIVATIONS, Activation, GateClamp, activate
from .routing import Assignments, rank_by_expert


class Experts(Module):
    """`down(weight * activation(gate(x)) * up(x))`, or `down(weight * activation(up(x)))`, with separate
    matrices per expert.

    Attributes:
        buffer: See `MoE.buffer`.
        weigh: See `MoE.weigh`.
        clamp: Bounds of gated experts, in place of their activation.
        b_down: Added where the tokens are, weighted as the experts are, so that its rows never travel.
    """

    activation: Activation = eqx.field(static=True)
    buffer: float = eqx.field(static=True)
    w_gate: Float[Array, "expert embed expert_ffn"] | None = parameter(normal("embed"))
    w_up: Float[Array, "expert embed expert_ffn"] = parameter(normal("embed"))
    w_down: Float[Array, "expert expert_ffn embed"] = parameter(normal("expert_ffn"))
    b_gate: Float[Array, "expert expert_ffn"] | None = parameter(None, default=None)
    b_up: Float[Array, "expert expert_ffn"] | None = parameter(None, default=None)
    b_down: Float[Array, "router embed"] | None = parameter(None, default=None)
    clamp: GateClamp | None = eqx.field(static=True, default=None)
    weigh: Literal["output", "input"] = eqx.field(static=True, default="output")

    @property
    def matrices(self) -> tuple[Any, ...]:
        """The matrices of all experts: gate or None, up, down."""
        return self.w_gate, self.w_up, self.w_down

    def __call__(
        self, x: Float[Array, "batch residual embed"], assigned: Assignments
    ) -> Float[Array, "batch residual embed"]:
        layout = current_layout()
        over, split = ((), ()) if layout is None else layout.compute(("expert", "expert_ffn"))
        opened = [
            (None, None) if w is None else gather_weight(w, axes, x.dtype)
            for w, axes in (
                (self.w_gate, "expert embed expert_ffn"),
                (self.w_up, "expert embed expert_ffn"),
                (self.w_down, "expert expert_ffn embed"),
                (self.b_gate, "expert expert_ffn"),
                (self.b_up, "expert expert_ffn"),
            )
        ]
        values, slots = (_ExpertWeights(*parts) for parts in zip(*opened))
        y = self._routed(x, assigned, values, slots, over, split)
        if self.b_down is None:
            return y
        experts = values.up.shape[0] * (jax.lax.axis_size(over) if over else 1)
        shares = _shares(assigned, x.shape[1], experts).astype(x.dtype)
        return y + contract("batch residual router, router embed -> batch residual embed", shares, self.b_down)

    def _routed(
        self,
        x: jax.Array,
        assigned: Assignments,
        values: "_ExpertWeights",
        slots: "_ExpertWeights",
        over: MeshAxes,
        split: MeshAxes,
    ) -> jax.Array:
        """Apply the experts, wherever they are, without `b_down`.

        Args:
            over: Mesh axes along which experts are sharded.
            split: Mesh axes that share each expert's columns.
        """
        if over:
            return self._exchanged(x, assigned, values, slots, over, split)
        gathered = bool(split) and bool(sequence_parallel_axes())
        if gathered:
            assigned = _gather_assignments(assigned, x.shape[1])
            x = all_gather_sequence(x)
        y = self._on_this_device(x, assigned, values, slots)
        if gathered:
            return reduce_scatter_sequence(y)
        # Each device has its columns' part of the sum.
        return psum_both(y, split) if split else y

    def _on_this_device(
        self, x: jax.Array, assigned: Assignments, values: "_ExpertWeights", slots: "_ExpertWeights"
    ) -> jax.Array:
        """Apply the experts if all of them are on this device."""
        experts, tokens = values.up.shape[0], x.reshape(-1, x.shape[-1])
        work = self._work(experts, assigned.expert.shape[0] * assigned.most)
        # expert, rank, row: [assignment]. `row` is the assignment's row in the sorted buffer.
        expert = assigned.expert.reshape(-1)
        counts, rank = rank_by_expert(expert, experts)
        groups = work.groups(counts)
        row = _place(expert, rank, groups.starts, groups.rows)
        places = _map_tokens(assigned, row, x.shape, groups.rows)
        weight = copy_to_rows(assigned.weight.reshape(-1), RowMap.of_positions(row[:, None], groups.rows))
        y = work(copy_to_rows(tokens, places), weight, values, slots, groups)
        return materialize(sum_by_token(y, places)).reshape(x.shape)

    def _exchanged(
        self,
        x: jax.Array,
        assigned: Assignments,
        values: "_ExpertWeights",
        slots: "_ExpertWeights",
        over: MeshAxes,
        split: MeshAxes,
    ) -> jax.Array:
        """Apply the experts if they are sharded along `over`, by an exchange in rounds."""
        ways = jax.lax.axis_size(over)
        experts, tokens = values.up.shape[0] * ways, x.reshape(-1, x.shape[-1])
        count = assigned.expert.shape[0] * assigned.most
        buffer = -(-int(count * self.buffer) // ways) * ways
        exchange = ExchangePlan(over, ways, buffer, ragged=current_target().traits.ragged_exchange)
        # Sort this device's assignments by expert; `row` [assignment] has no tile alignment before sending.
        expert = assigned.expert.reshape(-1)
        counts, rank = rank_by_expert(expert, experts)
        row = _place(expert, rank, jnp.cumsum(counts) - counts, count)
        plan = exchange.plan(counts)
        rounds = exchange.rounds(plan)
        # Devices along `column_axes` share each expert's columns, and must run the same number of rounds.
        column_axes = tuple(axis for axis in split if axis not in over)
        if column_axes:
            rounds = jax.lax.pmax(rounds, column_axes)
        received_rows = buffer * (jax.lax.axis_size(column_axes) if column_axes else 1)
        round_ = _Round(self._work(values.up.shape[0], received_rows), exchange, column_axes, count)
        constants = plan, _map_tokens(assigned, row, x.shape, count), RowMap.of_positions(row[:, None], count), values
        weight = assigned.weight.reshape(-1)
        y = sum_over_rounds(round_, rounds, constants, (tokens, weight), slots, max_rounds=exchange.max_rounds(count))
        return y.reshape(x.shape)

    def _work(self, experts: int, rows: int) -> "_Work":
        """Size the work of a device's experts for at most `rows` rows in total."""
        tile = choose_tile(current_target(), rows=rows, groups=experts)
        rows = aligned_row_count(rows, experts, tile)
        return _Work(self.activation, self.clamp, current_target(), rows, tile, self.weigh == "input")


class _ExpertWeights(NamedTuple):
    """Parameters of a device's experts that rows are multiplied with, or their gradient slots; None for absent ones."""

    gate: jax.Array | None
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None
    up_bias: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _Work:
    """The feed-forward of a device's experts on rows sorted by expert.

    Attributes:
        rows: Size of a buffer that fits the rows in any distribution over experts.
        tile: Each expert's rows start at a multiple of this.
        weighs_input: True if rows are multiplied by their weight before the first matmul, and not before the last.
    """

    activation: Activation
    clamp: GateClamp | None
    target: Target
    rows: int
    tile: int
    weighs_input: bool

    def groups(self, counts: Int[Array, " expert"]) -> Groups:
        return Groups(counts, self.rows, self.tile)

    def __call__(
        self,
        rows: jax.Array,
        weight: jax.Array,
        values: _ExpertWeights,
        slots: _ExpertWeights,
        groups: Groups,
    ) -> Float[Array, "row embed"]:
        gate, up, down, gate_bias, up_bias = (
            None if value is None or slot is None else GatheredWeight(value, slot) for value, slot in zip(values, slots)
        )
        assert up is not None and down is not None
        if self.weighs_input:
            rows = materialize((rows.astype(jnp.float32) * weight[:, None]).astype(rows.dtype))
            weight = jnp.ones_like(weight)
        plain = self.clamp is None and gate_bias is None and up_bias is None
        in_one_loop = plain and rows.dtype == jnp.float32 and self.target.traits.experts_in_one_loop
        if in_one_loop and is_blocked(rows.dtype, groups, self.target):
            present = [w for w in (gate, up, down) if w is not None]
            return apply_weight_op(_InOneLoop(self.activation), (rows, weight, groups), *present)

        def times(rows: jax.Array, w: GatheredWeight, bias: GatheredWeight | None = None) -> jax.Array:
            product = checkpoint_name(apply_weight_op(_Grouped(self.target), (rows, groups), w), PRODUCT)
            return product if bias is None else apply_weight_op(_GroupedBias(self.target), (product, groups), bias)

        hidden = times(rows, up, up_bias)
        opened = None if gate is None else times(rows, gate, gate_bias)
        hidden = activate(self.activation, self.clamp, opened, hidden)
        # Weight here and not after the last matmul: then the weight's gradient does not need that matmul's result.
        hidden = materialize((materialize(hidden).astype(jnp.float32) * weight[:, None]).astype(rows.dtype))
        return times(hidden, down)


@dataclasses.dataclass(frozen=True)
class _Round:
    """One round of the exchange: send rows to their experts, apply the experts, and bring the results back.

    Attributes:
        column_axes: The mesh axes that shard each expert.
        count: Number of this device's rows.
    """

    work: _Work
    exchange: ExchangePlan
    column_axes: MeshAxes
    count: int

    def __call__(self, number: jax.Array, constants: Any, variables: Any) -> Float[Array, "token embed"]:
        (plan, places, weight_places, values), ((tokens, weight), slots) = constants, variables
        window = self.exchange.window(plan, number)
        arrived = self._send(copy_to_rows(tokens, places), plan, window)
        weights = self._send(copy_to_rows(weight, weight_places), plan, window)
        # Lay out the arrivals of all devices along `column_axes` in one sorted buffer: per expert, device after device.
        arrivals = self.exchange.arrivals(plan, window)
        everyone = all_gather(arrivals.counts[None], self.column_axes, 0)
        groups = self.work.groups(everyone.sum(axis=0))
        before = (jnp.cumsum(everyone, axis=0) - everyone)[axis_index(self.column_axes)]
        row = _place(arrivals.expert, arrivals.rank, groups.starts + before, groups.rows)
        places_here = RowMap.of_positions(all_gather(row, self.column_axes, 0)[:, None], groups.rows)
        y = self.work(copy_to_rows(arrived, places_here), copy_to_rows(weights, places_here), values, slots, groups)
        # Sum the partial results of an expert's shards, then send each row back to its token's device.
        returned: jax.Array = reduce_scatter_sum(sum_by_token(y, places_here), self.column_axes, 0)
        return sum_by_token(self.exchange.send_back(returned, plan, window, self.count), places)

    def _send(self, rows: jax.Array, plan: RoutingCounts, window: Any) -> jax.Array:
        return all_gather_sum(
            checkpoint_name(self.exchange.send(rows, plan, window), EXCHANGED_ROWS), self.column_axes, 0
        )


def _place(expert: jax.Array, rank: jax.Array, starts: jax.Array, none: int) -> Int[Array, " assignment"]:
    """Return the row of each assignment, given each expert's first row; `none` for assignments without an
    expert."""
    inside = jnp.minimum(expert, starts.shape[0] - 1)
    return jnp.where(expert < starts.shape[0], starts[inside] + rank, none).astype(jnp.int32)


def _map_tokens(assigned: Assignments, row: jax.Array, shape: tuple[int, ...], rows: int) -> RowMap:
    """Map the tokens of `batch seq` to the buffer rows that copy them."""
    batch, length = shape[:2]
    if assigned.uses is not None:
        return RowMap.of_positions(row.reshape(batch * length, assigned.uses), rows)
    token = (assigned.position + length * jnp.arange(batch, dtype=jnp.int32)[:, None]).reshape(-1)
    of_row = jnp.full((rows,), batch * length, jnp.int32).at[row].set(token, mode="drop")
    return RowMap(of_row, None, batch * length)


def _shares(assigned: Assignments, length: int, experts: int) -> Float[Array, "batch residual router"]:
    """Return the weight of each expert in each token's result, 0 for those that it does not use."""
    rows = assigned.expert.shape[0]
    if assigned.uses is not None:
        expert, weight = (x.reshape(rows, length, assigned.uses) for x in (assigned.expert, assigned.weight))
        return (jax.nn.one_hot(expert, experts) * weight[..., None]).sum(axis=2)
    zeros = jnp.zeros((rows, length, experts), jnp.float32)
    at = jnp.arange(rows)[:, None], assigned.position, assigned.expert
    layout = current_layout()
    split = dict.fromkeys(() if layout is None else layout.compute(("residual",))[0], ValueState.SPLIT)
    return assert_sharding(zeros.at[at].add(assigned.weight, mode="drop"), split, 1)


def _gather_assignments(assigned: Assignments, length: int) -> Assignments:
    """Gather the assignments of the devices along the tensor axis, in the order of the gathered sequence."""
    axes = sequence_parallel_axes()
    position = assigned.position + length * axis_index(axes)
    return Assignments(
        all_gather(position, axes, 1),
        all_gather(assigned.expert, axes, 1),
        all_gather_sequence(assigned.weight),
        uses=assigned.uses,
        most=assigned.most * (1 if assigned.uses is None else jax.lax.axis_size(axes)),
    )


@dataclasses.dataclass(frozen=True)
class _Grouped(WeightOp):
    """Multiplication of each row by the matrix of its group."""

    target: Target

    def forward(self, inputs: tuple[jax.Array, Groups], *weights: GatheredWeight) -> tuple[jax.Array, Any]:
        (rows, groups), value = inputs, weights[0].value
        return grouped_product(rows, value, groups, target=self.target), (rows, value, groups)

    def backward(self, saved: Any, gradient: jax.Array, *dtypes: Any) -> tuple[Any, list[jax.Array]]:
        rows, value, groups = saved
        gradient = gradient.astype(rows.dtype)
        d_rows = grouped_product(gradient, value, groups, target=self.target, transposed=True)
        return (d_rows, None), [grouped_outer(rows, gradient, groups, target=self.target, out_dtype=dtypes[0])]


@dataclasses.dataclass(frozen=True)
class _GroupedBias(WeightOp):
    """Addition of the bias of its group to each row. Rows in gaps get a bias too, which their weight and
    gradient, both 0, remove."""

    target: Target

    def forward(self, inputs: tuple[jax.Array, Groups], *weights: GatheredWeight) -> tuple[jax.Array, Any]:
        (rows, groups), bias = inputs, weights[0].value
        group = jnp.repeat(groups.tile_group, groups.tile, total_repeat_length=groups.rows)
        return rows + jnp.take(bias, group, axis=0, mode="clip"), groups

    def backward(self, saved: Any, gradient: jax.Array, *dtypes: Any) -> tuple[Any, list[jax.Array]]:
        # Sums by group, in a fixed order on every platform: a product with a column of ones.
        ones = jnp.ones_like(gradient, shape=(gradient.shape[0], 1))
        sums = grouped_outer(ones, gradient, saved, target=self.target, out_dtype=dtypes[0])
        return (gradient, None), [sums[:, 0]]


@dataclasses.dataclass(frozen=True)
class _InOneLoop(WeightOp):
    """The experts' whole feed-forward, chunk by chunk."""

    activation: Activation

    def forward(self, inputs: tuple[jax.Array, jax.Array, Groups], *weights: GatheredWeight) -> tuple[jax.Array, Any]:
        rows, weight, groups = inputs
        matrices = _matrices([w.value for w in weights])
        y, inner = chunked_feed_forward(ACTIVATIONS[self.activation], rows, weight, matrices, groups)
        inner = jax.tree.map(lambda leaf: checkpoint_name(leaf, PRODUCT), inner)
        return y, (rows, weight, inner, matrices, groups)

    def backward(self, saved: Any, gradient: jax.Array, *dtypes: Any) -> tuple[Any, list[jax.Array]]:
        rows, weight, inner, matrices, groups = saved
        d_rows, d_weight, sums = chunked_feed_forward_gradients(
            ACTIVATIONS[self.activation], rows, weight, inner, matrices, groups, gradient
        )
        return (d_rows, d_weight, None), [leaf.astype(d) for leaf, d in zip(jax.tree.leaves(sums), dtypes)]


def _matrices(parts: list[jax.Array]) -> FeedForwardMatrices:
    """Build `FeedForwardMatrices` from (gate, up, down) or (up, down)."""
    return FeedForwardMatrices(parts[0] if len(parts) == 3 else None, parts[-2], parts[-1])
