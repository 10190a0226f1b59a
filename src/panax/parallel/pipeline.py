"""Executor of a pipeline's schedule, inside one `shard_map` over every mesh axis.

Every stage runs the same program and reads its work for each tick from the schedule's table (`schedules.py`).
A stage saves only the inputs of its units, and reruns a unit's forward pass in its backward pass: memory
therefore depends on the schedule's slots, not on the number of micro-batches. Nothing is differentiated
through the ticks; each unit's backward pass is a separate vjp.

All stages look up the embedding, and the first one uses it: stages tick together, so this costs no time. The
head and the loss would leave all stages but the last one idle. The items of a finished micro-batch are
therefore scattered over the stages; each computes the loss of its share, and the gradients are gathered back.

Terms: a unit is one chunk of a stage (a virtual stage) applied to one micro-batch. "outer" weights are those
outside of the stages. Slots: inputs [slot, batch, ...], gradients [gradient slot, batch, ...]; the last slot
of each is a dump.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..core.layout.layout import axis_size
from ..core.measures import Loss, is_measure, merge_measures, merged_fields, merges_by_max, neutral_value
from ..spmd.collectives import merge_over_devices
from ..spmd.sharding_marks import ValueState, assert_sharding
from .schedules import PipelineSchedule

AXIS = "stage"


class LastStageShare(NamedTuple):
    """This stage's share of the last layer's output for a finished micro-batch.

    Attributes:
        output: This share's items, zeros past the last one.
        part: Index of the share, 0 to stages - 1.
        parts: Number of shares.
        rank: Rank of the output: 3 for items that are positions of rows, 2 for rows.
    """

    output: Float[Array, "item embed"]
    part: Int[Array, ""]
    parts: int
    rank: int


class PipelineWork(NamedTuple):
    """The functions that a pipeline runs, each traced for one device.

    Attributes:
        embed: (outer weights, micro-batch) to the first virtual stage's input.
        layers: (one chunk's weights, input, micro-batch, chunk) to (output, objective, measures). The
            objective holds terms that layers contribute themselves, such as a balancing loss; 0.0 and {} if
            there are none.
        leave: (outer weights, output of the last virtual stage) to the loss's items; None if these are the
            output itself.
        loss: (outer weights, share, micro-batch) to (objective, measures) of the share's items.
    """

    embed: Callable[[Any, Any], jax.Array]
    layers: Callable[[Any, jax.Array, Any, jax.Array], tuple[jax.Array, jax.Array, Any]]
    leave: Callable[[Any, jax.Array], jax.Array] | None
    loss: Callable[[Any, LastStageShare, Any], tuple[jax.Array, Any]]


class PipelineOutput(NamedTuple):
    """Gradients with the structure of the weights (None for a forward-only schedule), and measures merged
    over micro-batches and stages."""

    outer: Any
    chunks: Any
    layer_measures: Any
    loss_measures: Any


class _Phase(NamedTuple):
    """Consecutive ticks of a schedule that run the same kinds of units, compiled as one scan.

    Attributes:
        rows: The schedule's rows of these ticks: (tick, stage).
    """

    goes_forward: bool
    goes_backward: bool
    rows: Any

    def uses(self, name: str) -> bool:
        """Return True if any stage has this work in any tick."""
        return any(row[name] for tick_rows in self.rows for row in tick_rows)


class _Carry(NamedTuple):
    inputs: jax.Array
    gradients: jax.Array
    outer: Any
    chunks: Any


def run_pipeline(
    schedule: PipelineSchedule, work: PipelineWork, outer: Any, chunks: Any, micro_batches: Any
) -> PipelineOutput:
    """Run all micro-batches through the pipeline.

    Args:
        outer: Weights of the embedding, the head and anything else outside of the stages.
        chunks: Weights of this stage's layers, each leaf with a leading axis of chunks.
        micro_batches: Every leaf with a leading axis of micro-batches.
    """
    stage = jax.lax.axis_index(AXIS)
    like = jax.eval_shape(work.embed, outer, jax.tree.map(lambda leaf: leaf[0], micro_batches))
    backward = any(b for _, b, _ in schedule.phases)

    def slots(count: int) -> jax.Array:
        # One slot more than the schedule uses, for values that no unit needs.
        return jnp.zeros((count + 1, *like.shape), like.dtype)

    def zeros(weights: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, weights) if backward else None

    carry = _Carry(slots(schedule.slots), slots(schedule.gradient_slots), zeros(outer), zeros(chunks))
    layer_measures, loss_measures, start = [], [], 0
    # One scan per phase: warm-up (forward only), steady state (both), cool-down (backward only).
    for goes_forward, goes_backward, ticks in schedule.phases:
        rows = schedule.rows[start : start + ticks]
        tick = _tick(work, outer, chunks, micro_batches, schedule.chunks, _Phase(goes_forward, goes_backward, rows))
        table = {name: np.array([[row[name] for row in tick_rows] for tick_rows in rows]) for name in rows[0][0]}
        mine = {name: jnp.asarray(column, jnp.int32)[:, stage] for name, column in table.items()}
        carry, (of_layers, of_loss) = jax.lax.scan(tick, carry, mine)
        layer_measures.append(_merged(of_layers))
        loss_measures.append(_merged(of_loss))
        start += ticks
    # The schedule's table determines which ticks count, which the per-operation sharding check cannot follow.
    outer, chunks = assert_sharding((carry.outer, carry.chunks), {AXIS: ValueState.UNKNOWN})
    return PipelineOutput(outer, chunks, _over_stages(layer_measures), _over_stages(loss_measures))


def _tick(
    work: PipelineWork, outer: Any, chunks: Any, micro_batches: Any, num_chunks: int, phase: _Phase
) -> Callable[[_Carry, Mapping[str, jax.Array]], tuple[_Carry, Any]]:
    """Return the body of a phase's scan over ticks."""

    def tick(carry: _Carry, row: Mapping[str, jax.Array]) -> tuple[_Carry, Any]:
        # 1. forward unit; 2. loss of the micro-batch that just finished; 3. backward unit; 4. exchange with neighbors.
        inputs, gradients, outer_sum, chunk_sum = carry
        output = returned = None
        of_layers, of_loss = {}, {}
        if phase.goes_forward:
            micro_batch = _at(micro_batches, row["forward_micro_batch"])
            x = _at(inputs, row["forward_slot"])
            if phase.uses("forward_first"):
                x = jnp.where(row["forward_first"] == 1, work.embed(outer, micro_batch), x)
                inputs = _put(inputs, x, row["forward_slot"])
            weights = select_chunk(chunks, row["forward_chunk"], num_chunks)
            output, _, of_layers = work.layers(weights, x, micro_batch, row["forward_chunk"])
            of_layers = _counted(of_layers, row["forward"] == 1)
            if phase.uses("loss"):
                micro_batch = _at(micro_batches, row["loss_micro_batch"])
                loss_outputs = _spread_loss(
                    work, outer, output, micro_batch, row["loss"] == 1, gradients=outer_sum is not None
                )
                of_loss, d_outer, d_output = loss_outputs
                of_loss = _counted(of_loss, row["loss"] == 1)
                if outer_sum is not None:
                    outer_sum = _added(outer_sum, d_outer, row["loss"] == 1)
                    gradients = _put(gradients, d_output, row["loss_slot"])
        if phase.goes_backward:
            micro_batch = _at(micro_batches, row["backward_micro_batch"])
            chunk = row["backward_chunk"]
            weights = select_chunk(chunks, chunk, num_chunks)
            x, gradient = _at(inputs, row["backward_slot"]), _at(gradients, row["backward_gradient_slot"])

            def of_weights(weights: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
                return work.layers(weights, x, micro_batch, chunk)[:2]

            # Runs the unit's forward pass again. The layers' own objective is a term of the loss: its cotangent is 1.
            (_, objective), pull = jax.vjp(of_weights, weights, x)
            d_weights, returned = pull((gradient, jnp.ones_like(objective)))
            chunk_sum = _added_to_chunk(chunk_sum, d_weights, chunk, num_chunks, row["backward"] == 1)
            if phase.uses("backward_first"):
                first = row["backward_first"] == 1
                _, pull = jax.vjp(lambda outer: work.embed(outer, micro_batch), outer)
                # Zeros elsewhere instead of skipping: a gradient reduce-scattered over stages has shards on all of them.
                d_outer = pull(jnp.where(first, returned, jnp.zeros_like(returned)))[0]
                outer_sum = jax.tree.map(jnp.add, outer_sum, d_outer)
        # Outputs go to the next stage, input gradients to the previous one; the table has the arrivals' slots.
        if output is not None:
            inputs = _put(inputs, _sent(output, 1), row["arrival_slot"])
        if returned is not None:
            gradients = _put(gradients, _sent(returned, -1), row["gradient_arrival_slot"])
        return _Carry(inputs, gradients, outer_sum, chunk_sum), (of_layers, of_loss)

    return tick


def _spread_loss(
    work: PipelineWork, outer: Any, output: jax.Array, micro_batch: Any, active: jax.Array, *, gradients: bool
) -> tuple[Any, Any, Any]:
    """Compute the loss with its items spread over the stages.

    Returns:
        Measures, gradients of the outer weights, and the gradient of the last stage's output; the gradients
        are None unless `gradients`.
    """
    stages = axis_size(AXIS)
    stage = jax.lax.axis_index(AXIS)
    items = output
    pull_items = None
    if work.leave is not None:
        items, pull_items = jax.vjp(work.leave, outer, output)
    flat = items.reshape(-1, items.shape[-1])
    count = -(-flat.shape[0] // stages) * stages
    # Scatter the last stage's items; the other stages contribute zeros to the sum.
    last = (stage == stages - 1) & active
    padded = jnp.pad(jnp.where(last, flat, jnp.zeros_like(flat)), ((0, count - flat.shape[0]), (0, 0)))
    share = jax.lax.psum_scatter(padded, AXIS, scatter_dimension=0, tiled=True)

    def objective(outer: Any, share: jax.Array) -> tuple[jax.Array, Any]:
        return work.loss(outer, LastStageShare(share, stage, stages, items.ndim), micro_batch)

    if not gradients:
        return objective(outer, share)[1], None, None
    (d_outer, d_share), measures = jax.grad(objective, argnums=(0, 1), has_aux=True)(outer, share)
    d_flat = jax.lax.all_gather(d_share, AXIS, axis=0, tiled=True)[: flat.shape[0]]
    if pull_items is None:
        return measures, d_outer, d_flat.reshape(output.shape)
    # Only the last stage's `leave` produced the items, so the gradient is zero on the others.
    d_leave, d_output = pull_items(jnp.where(last, d_flat, jnp.zeros_like(d_flat)).reshape(items.shape))
    return measures, jax.tree.map(jnp.add, d_outer, d_leave), d_output


def _sent(x: jax.Array, by: int) -> jax.Array:
    stages = axis_size(AXIS)
    return jax.lax.ppermute(x, AXIS, [(stage, (stage + by) % stages) for stage in range(stages)])


def _at(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _put(slots: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(slots, value.astype(slots.dtype), index, 0)


def select_chunk(chunks: Any, index: jax.Array, count: int) -> Any:
    """Return one chunk's weights, from leaves with a leading axis of `count` chunks."""
    return jax.tree.map(lambda leaf: leaf[0], chunks) if count == 1 else _at(chunks, index)


def _added(total: Any, part: Any, counts: jax.Array) -> Any:
    return jax.tree.map(lambda t, p: jnp.where(counts, t + p, t), total, part)


def _added_to_chunk(total: Any, part: Any, index: jax.Array, count: int, counts: jax.Array) -> Any:
    if count == 1:
        return jax.tree.map(lambda t, p: jnp.where(counts, t + p[None], t), total, part)

    def one(t: jax.Array, p: jax.Array) -> jax.Array:
        old = jax.lax.dynamic_index_in_dim(t, index, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(t, jnp.where(counts, old + p, old), index, 0)

    return jax.tree.map(one, total, part)


def _counted(measures: Any, counts: jax.Array) -> Any:
    """Return the measures, or neutral values for merging if they do not count."""

    def one(measure: Any) -> Any:
        def counted(leaf: jax.Array) -> jax.Array:
            leaf = jnp.asarray(leaf)
            return jnp.where(counts, leaf, jnp.asarray(neutral_value(measure, leaf.dtype), leaf.dtype))

        return _by_field(measure, counted, jnp.asarray)

    return jax.tree.map(one, measures, is_leaf=is_measure)


def _merged(stacked: Any) -> Any:
    """Merge the measures of a phase's ticks."""

    def one(measure: Any) -> Any:
        largest = merges_by_max(measure)
        return _by_field(measure, lambda leaf: leaf.max(axis=0) if largest else leaf.sum(axis=0), lambda leaf: leaf[0])

    return jax.tree.map(one, stacked, is_leaf=is_measure)


def _by_field(measure: Any, of_sums: Callable[[jax.Array], jax.Array], of_coefficient: Callable[[Any], Any]) -> Any:
    changed = {name: of_sums(getattr(measure, name)) for name in merged_fields(measure)}
    if isinstance(measure, Loss):
        changed["coefficient"] = of_coefficient(measure.coefficient)
    return dataclasses.replace(measure, **changed)


def _over_stages(phases: list[Any]) -> Any:
    merged: Any = {}
    for measures in phases:
        if measures:
            merged = merge_measures(merged, measures) if merged else measures

    def terms(measure: Any) -> Any:
        holds = {AXIS: ValueState.OWN if merges_by_max(measure) else ValueState.PARTIAL}
        return _by_field(measure, lambda leaf: assert_sharding(leaf, holds), lambda coefficient: coefficient)

    return merge_over_devices(jax.tree.map(terms, merged, is_leaf=is_measure), (AXIS,))
