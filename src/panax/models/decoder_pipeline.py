"""The decoder in a pipeline: what a stage runs. Which layers it holds, and how they get there, is in `decoder_stages.py`."""

import dataclasses
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ..core import Batch, Evaluation, Gradients, current_layout, logical_axes, total_loss, use_layout
from ..core.layout import axis_size
from ..core.measures import Losses, Metrics
from ..parallel.pipeline import AXIS, Outcome, Share, Work, chunk_of, run
from ..parallel.schedules import build
from ..spmd import over_tokens, sequence_parallel_axes
from ..spmd.once import closed_gradients, gathered_once, slot_gradients, split_slots
from .decoder import Decoder
from .decoder_stages import StageLayers

if TYPE_CHECKING:
    from .decoder_task import DecoderTask


def gradients(
    task: "DecoderTask", params: Decoder, state: Any, micro_batches: Batch, key: jax.Array, trainable: Any
) -> Gradients:
    """As `Task.gradients`, in the storage layout."""
    weights = over_tokens(dict(task.loss_weights(params, state, micro_batches, key)))
    layers = StageLayers.of(task.model, task.pipeline.chunks, params, task.weight_dtype)
    outcome, outer_axes = _run(task, params, state, layers, micro_batches, key, weights, train=True)
    outer = closed_gradients(outcome.outer, outer_axes)
    found = dataclasses.replace(outer, stacks=layers.returned(slot_gradients(outcome.chunks)))
    kept = jax.tree.map(lambda gradient, keep: gradient if keep else None, found, trainable)
    losses, metrics = _all_measures(outcome)
    return Gradients(kept, losses, state, metrics)


def evaluation(
    task: "DecoderTask", params: Decoder, state: Any, batch: Batch, key: jax.Array, train: bool
) -> Evaluation:
    """As `Task.loss`, without gradients: the rows go through the pipeline in parts, so that all stages have work."""
    rows, stages = batch["row"].shape[0], axis_size(AXIS)
    parts = max(n for n in range(1, stages + 1) if rows % n == 0)
    micro_batches = {name: leaf.reshape(parts, rows // parts, *leaf.shape[1:]) for name, leaf in batch.items()}
    layers = StageLayers.of(task.model, task.pipeline.chunks, params, task.weight_dtype)
    outcome, _ = _run(task, params, state, layers, micro_batches, key, None, train=train)
    losses, metrics = _all_measures(outcome)
    return Evaluation(losses, state, metrics)


def _all_measures(outcome: Outcome) -> tuple[Losses, Metrics]:
    (losses, metrics), (of_layers, watched) = outcome.loss_measures, outcome.layer_measures
    return {**losses, **of_layers}, {**metrics, **watched}


def _run(
    task: "DecoderTask",
    params: Decoder,
    state: Any,
    layers: StageLayers,
    micro_batches: Batch,
    key: jax.Array,
    weights: Any,
    *,
    train: bool,
) -> tuple[Outcome, Any]:
    layout = current_layout()
    assert layout is not None
    outer = dataclasses.replace(params, stacks=())
    axes = logical_axes(outer)
    if layout.zero != "3":
        outer = gathered_once(outer, axes, task.weight_dtype, scattered=layout.zero == "2")
    free, fixed = split_slots(outer)
    free_layers, fixed_layers = split_slots(layers.weights)

    def embed(outer: Any, batch: Batch) -> jax.Array:
        model: Decoder = eqx.combine(outer, fixed)
        return model.enter(batch["tokens"], task.context(batch, key, train), task.weight_dtype)

    def run_layers(weights_: Any, x: jax.Array, batch: Batch, chunk: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        whole = eqx.combine(weights_, chunk_of(fixed_layers, chunk, layers.chunks))
        # Every virtual stage sees all tokens: the first one says how many there are.
        first = (jax.lax.axis_index(AXIS) == 0) & (chunk == 0)
        with use_layout(layout.without(AXIS)):
            context, bias = task.context(batch, key, train), state.get("router_bias")
            y, terms = layers.run(whole, x, context, chunk, task.remat if train else "none", bias)
            losses, metrics = task.measured_routers(terms, jnp.where(first, task.count(batch), 0.0), train)
        objective = jnp.float32(0.0) if weights is None else total_loss(losses, weights)
        return y, objective, (dict(losses), dict(metrics))

    def loss(outer: Any, share: Share, batch: Batch) -> tuple[jax.Array, Any]:
        model: Decoder = eqx.combine(outer, fixed)
        hidden = model.final_norm(share.output[None])
        targets, mask = (_share_of(batch[name], share)[None] for name in ("targets", "loss_mask"))
        losses, metrics = task.measured(model, hidden, targets, mask, train)
        return total_loss(losses, weights), (dict(losses), dict(metrics))

    count = micro_batches["row"].shape[0]
    schedule = build(task.pipeline, stages=axis_size(AXIS), micro_batches=count, forward_only=weights is None)
    return run(schedule, Work(embed, run_layers, loss), free, free_layers, micro_batches), axes


def _share_of(leaf: jax.Array, share: Share) -> jax.Array:
    """The tokens whose hidden states `whole_sequence` puts together from this stage's shares along the tensor axis."""
    axes = sequence_parallel_axes()
    ways = jax.lax.axis_size(axes) if axes else 1
    rows, length = leaf.shape
    flat = leaf.reshape(rows, ways, length // ways).swapaxes(0, 1).reshape(ways, -1)
    each = share.output.shape[0]
    padded = jnp.pad(flat, ((0, 0), (0, each * share.parts - flat.shape[1])))
    return jax.lax.dynamic_slice_in_dim(padded, share.part * each, each, axis=1).reshape(-1)
