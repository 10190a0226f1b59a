"""Execution of a staged task in a pipeline: the work of one stage. `stage_layers.py` determines which layers
a stage holds and moves them there."""

from typing import TYPE_CHECKING, Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp

from ...core import Batch, Evaluation, Gradients, current_layout, logical_axes, use_layout
from ...core.layout.layout import axis_size
from ...core.loss_scale import scaled_objective
from ...core.measures import Losses, Metrics
from ...parallel.pipeline import AXIS, LastStageShare, PipelineOutput, PipelineWork, run_pipeline, select_chunk
from ...parallel.schedules import build_schedule
from ...spmd import ValueState, assert_sharding, psum_over_tokens, sequence_parallel_axes, token_axes
from ...spmd.step_gather import gather_params_per_step, reduce_grads, slot_gradients, split_slots
from .stage_layers import StageLayers

if TYPE_CHECKING:
    from .staged_task import StagedTask


class _Inputs(NamedTuple):
    """Arrays that a pass through the pipeline reads; every leaf of a batch has a leading axis of
    micro-batches."""

    params: Any
    state: Any
    micro_batches: Batch
    key: jax.Array


def compute_pipeline_grads(
    task: "StagedTask", params: Any, state: Any, micro_batches: Batch, key: jax.Array, trainable: Any
) -> Gradients:
    """Compute gradients through the pipeline, as `Task.gradients` does, in the storage sharding."""
    weights = psum_over_tokens(dict(task.loss_weights(params, state, micro_batches, key)))
    layers = StageLayers.of(
        task.stacks(params), task.pipeline.chunks, task.weight_dtype, trainable=task.stacks(trainable)
    )
    outcome, outer_axes = _run(task, _Inputs(params, state, micro_batches, key), layers, weights, train=True)
    outer = reduce_grads(outcome.outer, outer_axes)
    all_gradients = task.with_stacks(outer, layers.restore_grads(slot_gradients(outcome.chunks)))
    trained_gradients = jax.tree.map(
        lambda gradient, is_trained: gradient if is_trained else None,
        all_gradients,
        trainable,
        is_leaf=lambda node: node is None,
    )
    losses, metrics = _all_measures(outcome)
    return Gradients(trained_gradients, losses, state, metrics)


def evaluate_pipeline(
    task: "StagedTask", params: Any, state: Any, batch: Batch, key: jax.Array, train: bool
) -> Evaluation:
    """Evaluate through the pipeline, as `Task.loss` does, without gradients; rows are split into parts so
    that all stages have work."""
    rows, stages = batch["row"].shape[0], axis_size(AXIS)
    parts = max(n for n in range(1, stages + 1) if rows % n == 0)
    micro_batches = {name: leaf.reshape(parts, rows // parts, *leaf.shape[1:]) for name, leaf in batch.items()}
    layers = StageLayers.of(task.stacks(params), task.pipeline.chunks, task.weight_dtype)
    outcome, _ = _run(task, _Inputs(params, state, micro_batches, key), layers, None, train=train)
    losses, metrics = _all_measures(outcome)
    return Evaluation(losses, state, metrics)


def _all_measures(outcome: PipelineOutput) -> tuple[Losses, Metrics]:
    (losses, metrics), (of_layers, watched) = outcome.loss_measures, outcome.layer_measures
    return {**losses, **of_layers}, {**metrics, **watched}


def _run(
    task: "StagedTask", inputs: _Inputs, layers: StageLayers, weights: Any, *, train: bool
) -> tuple[PipelineOutput, Any]:
    """Run the pipeline.

    Args:
        weights: Weight of each loss in the objective to differentiate; None to run forward only.

    Returns:
        The pipeline's output, and the logical axes of the parameters outside of the stages.
    """
    params, state, micro_batches, key = inputs
    layout = current_layout()
    assert layout is not None
    # `outer` holds the parameters outside of the stages (embeddings, head), gathered once per step below ZeRO-3.
    outer = task.with_stacks(params, ())
    axes = logical_axes(outer)
    if layout.zero.gathers_per_step:
        outer = gather_params_per_step(outer, axes, task.weight_dtype, scattered=not layout.zero.scatters_per_step)
    # "free" is differentiated (gradient slots of gathered weights, other parameters); "fixed" holds gathered values.
    free, fixed = split_slots(outer)
    free_layers, fixed_layers = split_slots(layers.weights)

    def enter(outer: Any, batch: Batch) -> jax.Array:
        return task.enter(eqx.combine(outer, fixed), batch, task.context(batch, key, train))

    def run_layers(weights_: Any, x: jax.Array, batch: Batch, chunk: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        layer_weights = eqx.combine(weights_, select_chunk(fixed_layers, chunk, layers.chunks))
        # Every virtual stage processes all positions, so only the first one counts them.
        first = (jax.lax.axis_index(AXIS) == 0) & (chunk == 0)
        with use_layout(layout.without_axis(AXIS)):
            context, of_layers = task.context(batch, key, train), task.layer_inputs(state, batch)
            y, reports = layers.run(layer_weights, x, context, chunk, task.remat if train else "none", of_layers)
            losses, metrics = task.layer_metrics(reports, jnp.where(first, task.count_tokens(batch), 0.0), train)
        objective = jnp.float32(0.0) if weights is None else scaled_objective(losses, weights)
        return y, objective, (dict(losses), dict(metrics))

    def leave(outer: Any, x: jax.Array) -> jax.Array:
        return task.leave(eqx.combine(outer, fixed), x)

    def loss(outer: Any, share: LastStageShare, batch: Batch) -> tuple[jax.Array, Any]:
        # If items are positions, treat this stage's share as one long row, so that the code below is the same.
        by_position = share.rank == 3
        targets = {name: _share_of(leaf, share, by_position) for name, leaf in task.targets(batch).items()}
        # Declared explicitly, since a task may create its weights itself, as ones.
        parts = dict.fromkeys(token_axes(), ValueState.SPLIT)
        targets = assert_sharding(targets, parts, dim=1 if by_position else 0)
        with use_layout(layout.with_rows_over(AXIS)):
            items = share.output[None] if by_position else share.output
            losses, metrics = task.compute_metrics(eqx.combine(outer, fixed), items, targets, train)
        return scaled_objective(losses, weights), (dict(losses), dict(metrics))

    count = micro_batches["row"].shape[0]
    schedule = build_schedule(task.pipeline, stages=axis_size(AXIS), micro_batches=count, forward_only=weights is None)
    work = PipelineWork(enter, run_layers, leave if task.has_custom_leave else None, loss)
    return run_pipeline(schedule, work, free, free_layers, micro_batches), axes


def _share_of(leaf: jax.Array, share: LastStageShare, by_position: bool) -> jax.Array:
    """Return this stage's share of an array.

    If items are positions, the share follows the order in which `all_gather_sequence` concatenates along the
    axes that shard the residual stream further than its rows; zeros past the end.
    """
    each, ways = share.output.shape[0], 1
    if by_position:
        axes = sequence_parallel_axes()
        ways = jax.lax.axis_size(axes) if axes else 1
        inner = leaf.shape[2:]
        leaf = leaf.reshape(leaf.shape[0], ways, leaf.shape[1] // ways, *inner).swapaxes(0, 1).reshape(ways, -1, *inner)
    else:
        leaf = leaf[None]
    padding = each * share.parts - leaf.shape[1]
    padded = jnp.pad(leaf, ((0, 0), (0, padding), *((0, 0),) * (leaf.ndim - 2)))
    stage_share = jax.lax.dynamic_slice_in_dim(padded, share.part * each, each, axis=1)
    return stage_share.reshape(1, -1, *stage_share.shape[2:]) if by_position else stage_share[0]
