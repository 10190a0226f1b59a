"""The experts: many small feed-forward layers, each applied to the tokens that chose it, by grouped matrix products.

No token is dropped and none is padded to a capacity: rows are sorted by expert, whatever their numbers. Over the expert axis of
a mesh, rows travel to the devices that hold their experts (`parallel/exchange.py`). Where experts are split over the tensor axis
too, those devices put their tokens together first, and each adds its part of the result.

Sources: MegaBlocks (arXiv:2211.15841) for computing without capacity, GShard (arXiv:2006.16668) for the expert axis.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from ..core import Module, Target, current_layout, current_target, normal, parameter
from ..core.layout import MeshAxes
from ..kernels.grouped import Groups, aligned_rows, choose_tile, grouped_outer, grouped_product, runs_in_blocks
from ..kernels.grouped_feed_forward import Matrices, chunked_feed_forward, chunked_feed_forward_gradients
from ..parallel.exchange import ExchangePlan, Plan
from ..parallel.remat import EXCHANGED
from ..parallel.rounds import sum_over_rounds
from ..parallel.rows import RowMap, collect, spread
from ..spmd import (
    GatheredWeight,
    WeightOp,
    all_gather_sequence,
    apply_weight_op,
    gather_weight,
    reduce_scatter_sequence,
    sequence_parallel_axes,
)
from ..spmd.collectives import all_gather, axis_index
from ..spmd.contraction import PRODUCT
from ..spmd.linear import all_gather_sum, reduce_scatter_sum
from .feed_forward import ACTIVATIONS, Activation
from .routing import Assigned, rank_by_expert


class Experts(Module):
    """`down(weight * activation(gate(x)) * up(x))`, or `down(weight * activation(up(x)))`, with each expert's own matrices.

    Attributes:
        buffer: See `MoE.buffer`.
    """

    activation: Activation = eqx.field(static=True)
    buffer: float = eqx.field(static=True)
    w_gate: Float[Array, "expert embed expert_ffn"] | None = parameter(normal("embed"))
    w_up: Float[Array, "expert embed expert_ffn"] = parameter(normal("embed"))
    w_down: Float[Array, "expert expert_ffn embed"] = parameter(normal("expert_ffn"))

    def __call__(
        self, x: Float[Array, "batch residual embed"], assigned: Assigned
    ) -> Float[Array, "batch residual embed"]:
        layout = current_layout()
        over, split = ((), ()) if layout is None else layout.compute(("expert", "expert_ffn"))
        opened = [
            (None, None) if w is None else gather_weight(w, axes, x.dtype)
            for w, axes in (
                (self.w_gate, "expert embed expert_ffn"),
                (self.w_up, "expert embed expert_ffn"),
                (self.w_down, "expert expert_ffn embed"),
            )
        ]
        values, slots = (Matrices(*parts) for parts in zip(*opened))
        if over:
            return self._exchanged(x, assigned, values, slots, over, split)
        gathered = bool(split) and bool(sequence_parallel_axes())
        if gathered:
            assigned = _with_the_others(assigned, x.shape[1])
            x = all_gather_sequence(x)
        y = self._here(x, assigned, values, slots)
        return reduce_scatter_sequence(y) if gathered else y

    def _here(self, x: jax.Array, assigned: Assigned, values: Matrices, slots: Matrices) -> jax.Array:
        """All experts on this device."""
        experts, tokens = values.up.shape[0], x.reshape(-1, x.shape[-1])
        work = _Work.of(self.activation, experts, assigned.expert.shape[0] * assigned.most)
        expert = assigned.expert.reshape(-1)
        counts, rank = rank_by_expert(expert, experts)
        groups = work.groups(counts)
        row = _place(expert, rank, groups.starts, groups.rows)
        places = _of_tokens(assigned, row, x.shape, groups.rows)
        weight = spread(assigned.weight.reshape(-1), RowMap.of_places(row[:, None], groups.rows))
        return collect(work(spread(tokens, places), weight, values, slots, groups), places).reshape(x.shape)

    def _exchanged(
        self, x: jax.Array, assigned: Assigned, values: Matrices, slots: Matrices, over: MeshAxes, split: MeshAxes
    ) -> jax.Array:
        """Each expert on one device along `over`."""
        ways = jax.lax.axis_size(over)
        experts, tokens = values.up.shape[0] * ways, x.reshape(-1, x.shape[-1])
        count = assigned.expert.shape[0] * assigned.most
        buffer = -(-int(count * self.buffer) // ways) * ways
        exchange = ExchangePlan(over, ways, buffer, ragged=current_target().traits.ragged_exchange)
        expert = assigned.expert.reshape(-1)
        counts, rank = rank_by_expert(expert, experts)
        row = _place(expert, rank, jnp.cumsum(counts) - counts, count)
        plan = exchange.plan(counts)
        rounds = exchange.rounds(plan)
        beside = tuple(axis for axis in split if axis not in over)
        if beside:
            rounds = jax.lax.pmax(rounds, beside)
        held = buffer * (jax.lax.axis_size(beside) if beside else 1)
        round_ = _Round(_Work.of(self.activation, values.up.shape[0], held), exchange, beside, count)
        constants = plan, _of_tokens(assigned, row, x.shape, count), RowMap.of_places(row[:, None], count), values
        weight = assigned.weight.reshape(-1)
        y = sum_over_rounds(round_, rounds, constants, (tokens, weight), slots, most=exchange.most_rounds(count))
        return y.reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class _Work:
    """The feed-forward of a device's experts on rows that are sorted by expert.

    Attributes:
        rows: Of a buffer that holds any distribution of the rows.
        tile: Each expert's rows begin at a multiple of it.
    """

    activation: Activation
    target: Target
    rows: int
    tile: int

    @classmethod
    def of(cls, activation: Activation, experts: int, rows: int) -> "_Work":
        """For so many rows in all."""
        tile = choose_tile(current_target(), rows=rows, groups=experts)
        return cls(activation, current_target(), aligned_rows(rows, experts, tile), tile)

    def groups(self, counts: Int[Array, " expert"]) -> Groups:
        return Groups(counts, self.rows, self.tile)

    def __call__(
        self, rows: jax.Array, weight: jax.Array, values: Matrices, slots: Matrices, groups: Groups
    ) -> Float[Array, "row embed"]:
        gate, up, down = (
            None if value is None or slot is None else GatheredWeight(value, slot) for value, slot in zip(values, slots)
        )
        in_one_loop = rows.dtype == jnp.float32 and self.target.traits.experts_in_one_loop
        if in_one_loop and runs_in_blocks(rows.dtype, groups, self.target):
            present = [w for w in (gate, up, down) if w is not None]
            return apply_weight_op(_InOneLoop(self.activation), (rows, weight, groups), *present)

        def times(rows: jax.Array, w: Any) -> jax.Array:
            return checkpoint_name(apply_weight_op(_Grouped(self.target), (rows, groups), w), PRODUCT)

        act, hidden = ACTIVATIONS[self.activation], times(rows, up)
        hidden = act(hidden) if gate is None else act(times(rows, gate)) * hidden
        # Weighted here, not after the last product, whose result is then not needed for the weight's gradient.
        hidden = (hidden.astype(jnp.float32) * weight[:, None]).astype(rows.dtype)
        return times(hidden, down)


@dataclasses.dataclass(frozen=True)
class _Round:
    """One round of the exchange: rows to their experts, through them, and back.

    Attributes:
        beside: The mesh axes that each expert is split over.
        count: This device's rows.
    """

    work: _Work
    exchange: ExchangePlan
    beside: MeshAxes
    count: int

    def __call__(self, number: jax.Array, constants: Any, variables: Any) -> Float[Array, "token embed"]:
        (plan, places, weight_places, values), ((tokens, weight), slots) = constants, variables
        window = self.exchange.window(plan, number)
        arrived = self._send(spread(tokens, places), plan, window)
        weights = self._send(spread(weight, weight_places), plan, window)
        arrivals = self.exchange.arrivals(plan, window)
        everyone = all_gather(arrivals.counts[None], self.beside, 0)
        groups = self.work.groups(everyone.sum(axis=0))
        before = (jnp.cumsum(everyone, axis=0) - everyone)[axis_index(self.beside)]
        row = _place(arrivals.expert, arrivals.rank, groups.starts + before, groups.rows)
        places_here = RowMap.of_places(all_gather(row, self.beside, 0)[:, None], groups.rows)
        y = self.work(spread(arrived, places_here), spread(weights, places_here), values, slots, groups)
        returned: jax.Array = reduce_scatter_sum(collect(y, places_here), self.beside, 0)
        return collect(self.exchange.bring(returned, plan, window, self.count), places)

    def _send(self, rows: jax.Array, plan: Plan, window: Any) -> jax.Array:
        return all_gather_sum(checkpoint_name(self.exchange.send(rows, plan, window), EXCHANGED), self.beside, 0)


def _place(expert: jax.Array, rank: jax.Array, starts: jax.Array, none: int) -> Int[Array, " assignment"]:
    """The row of each assignment, given where each expert's rows begin."""
    inside = jnp.minimum(expert, starts.shape[0] - 1)
    return jnp.where(expert < starts.shape[0], starts[inside] + rank, none).astype(jnp.int32)


def _of_tokens(assigned: Assigned, row: jax.Array, shape: tuple[int, ...], rows: int) -> RowMap:
    """Which tokens of `batch seq` the rows of a buffer are copies of."""
    batch, length = shape[:2]
    if assigned.uses is not None:
        return RowMap.of_places(row.reshape(batch * length, assigned.uses), rows)
    token = (assigned.position + length * jnp.arange(batch, dtype=jnp.int32)[:, None]).reshape(-1)
    of_row = jnp.full((rows,), batch * length, jnp.int32).at[row].set(token, mode="drop")
    return RowMap(of_row, None, batch * length)


def _with_the_others(assigned: Assigned, length: int) -> Assigned:
    """What the devices along the tensor axis assigned, all together, in the order of the gathered sequence."""
    axes = sequence_parallel_axes()
    position = assigned.position + length * axis_index(axes)
    return Assigned(
        all_gather(position, axes, 1),
        all_gather(assigned.expert, axes, 1),
        all_gather_sequence(assigned.weight),
        uses=assigned.uses,
        most=assigned.most * (1 if assigned.uses is None else jax.lax.axis_size(axes)),
    )


@dataclasses.dataclass(frozen=True)
class _Grouped(WeightOp):
    """Rows, each by its group's matrix."""

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


def _matrices(parts: list[jax.Array]) -> Matrices:
    """Of (gate, up, down) or (up, down)."""
    return Matrices(parts[0] if len(parts) == 3 else None, parts[-2], parts[-1])
