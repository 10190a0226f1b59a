"""The decoder in a pipeline: which layers each stage holds, how they get there, and what a stage runs.

Layers rest between steps where they are computed, if each stage's are equal in number and adjacent in storage. Otherwise (126
layers on 16 stages, several chunks a stage, two kinds of stacks) they rest split along `embed`, as one array that is the same on
any mesh, and an all-to-all takes each stage its own at the beginning of a step, and their gradients back at its end.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..core import Batch, Evaluation, Gradients, current_layout, logical_axes, total_loss, use_layout
from ..core.collectives import gather_dims, over_tokens, scatter_dims
from ..core.contraction import sequence_parallel_axes
from ..core.layout import Layout, axis_size
from ..core.protocols import Axes
from ..core.weights import Weight, gathered_once, gathers_of, slot_gradients, split_slots
from ..parallel import rematerialise, scan_layers
from ..parallel.pipeline import AXIS, Outcome, Share, Work, chunk_of, run
from ..parallel.schedules import build, layers_by_stage
from .decoder import Decoder

if TYPE_CHECKING:
    from .decoder_task import DecoderTask


def layers_rest_on_stages(task: "DecoderTask", stages: int) -> bool:
    """Whether each stage's layers are adjacent in storage and equal in number."""
    stacks = task.model.stacks
    return task.pipeline.chunks == 1 and len(stacks) == 1 and stacks[0][1] % stages == 0


def gradients(
    task: "DecoderTask", params: Decoder, state: Any, micro_batches: Batch, key: jax.Array, trainable: Any
) -> Gradients:
    """As `Task.gradients`, in the storage layout."""
    weights = over_tokens(dict(task.loss_weights(params, state, micro_batches, key)))
    layers = _Layers.of(task, params)
    outcome, outer_axes = _run(task, params, layers, micro_batches, key, weights, train=True)
    outer = _closed(slot_gradients(outcome.outer), outer_axes)
    found = dataclasses.replace(outer, stacks=layers.returned(slot_gradients(outcome.chunks)))
    kept = jax.tree.map(lambda gradient, keep: gradient if keep else None, found, trainable)
    losses, metrics = outcome.loss_measures
    return Gradients(kept, losses, state, metrics)


def evaluation(
    task: "DecoderTask", params: Decoder, state: Any, batch: Batch, key: jax.Array, train: bool
) -> Evaluation:
    """As `Task.loss`, without gradients: the rows go through the pipeline in parts, so that all stages have work."""
    rows, stages = batch["row"].shape[0], axis_size(AXIS)
    parts = max(n for n in range(1, stages + 1) if rows % n == 0)
    micro_batches = {name: leaf.reshape(parts, rows // parts, *leaf.shape[1:]) for name, leaf in batch.items()}
    outcome, _ = _run(task, params, _Layers.of(task, params), micro_batches, key, None, train=train)
    losses, metrics = outcome.loss_measures
    return Evaluation(losses, state, metrics)


def _run(
    task: "DecoderTask",
    params: Decoder,
    layers: "_Layers",
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
        leaves, treedef = jax.tree.flatten(outer)
        outer = treedef.unflatten(
            gathered_once(w, tuple(a), task.weight_dtype, scattered=layout.zero == "2")
            for w, a in zip(leaves, treedef.flatten_up_to(axes))
        )
    free, fixed = split_slots(outer)
    free_layers, fixed_layers = split_slots(layers.weights)

    def embed(outer: Any, batch: Batch) -> jax.Array:
        model: Decoder = eqx.combine(outer, fixed)
        return model.enter(batch["tokens"], task.context(batch, key, train), task.weight_dtype)

    def run_layers(
        weights: Any, x: jax.Array, batch: Batch, chunk: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        whole = eqx.combine(weights, chunk_of(fixed_layers, chunk, layers.chunks))
        with use_layout(layout.without(AXIS)):
            context = task.context(batch, key, train)
            return layers.run(whole, x, context, chunk, task.remat if train else "none"), jnp.float32(0.0), {}

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


def _closed(gradients: Any, axes: Any) -> Any:
    """Gradients of weights that were gathered once, in their storage layout."""
    layout = current_layout()
    if layout is None or layout.zero != "1":
        return gradients
    leaves, treedef = jax.tree.flatten(gradients)
    return treedef.unflatten(scatter_dims(g, gathers_of(tuple(a))) for g, a in zip(leaves, treedef.flatten_up_to(axes)))


@dataclasses.dataclass(frozen=True)
class _Layers:
    """A stage's own layers.

    Attributes:
        weights: One tree for all of them, a list of what a block's leaves are; each with the leading axes [chunk, slot].
        order: [stage, chunk, slot] to layer; -1 where a stage has fewer than others.
        treedefs: The distinct blocks by their static settings (windows).
        kind_of_layer: Which of these each layer is.
        axes: The logical axes of each leaf, `layer` first.
        stacks: The decoder's, as they are stored.
        dtype: What weights are gathered in.
    """

    layout: Layout
    weights: list[Any]
    order: np.ndarray
    treedefs: list[Any]
    kind_of_layer: np.ndarray
    axes: list[Axes]
    stacks: Any
    dtype: Any

    @classmethod
    def of(cls, task: "DecoderTask", params: Decoder) -> "_Layers":
        """Take each stage its layers, and gather them where that is done once a step."""
        layout = current_layout()
        assert layout is not None
        stages, chunks = axis_size(AXIS), task.pipeline.chunks
        held = layers_by_stage(task.model.num_layers, stages=stages, chunks=chunks)
        most = max(len(layers) for stage in held for layers in stage)
        order = np.array([[[*layers, *[-1] * (most - len(layers))] for layers in stage] for stage in held])
        treedefs: list[Any] = []
        kinds: list[int] = []
        for stack in params.stacks:
            period = [jax.tree.structure(block) for block in stack.blocks]
            for treedef in period:
                if treedef not in treedefs:
                    treedefs.append(treedef)
            kinds += [treedefs.index(treedef) for treedef in period] * stack.repeats
        axes = jax.tree.structure(params.stacks[0].blocks[0]).flatten_up_to(logical_axes(params).stacks[0].blocks[0])
        layers = cls(layout, [], order, treedefs, np.array(kinds), list(axes), params.stacks, task.weight_dtype)
        weights = [layers._brought(leaf, a) for leaf, a in zip(_by_layer(params.stacks), axes)]
        return dataclasses.replace(layers, weights=weights)

    @property
    def chunks(self) -> int:
        return self.order.shape[1]

    @property
    def rest(self) -> bool:
        """Whether they are stored where they are computed."""
        return self.layout.storage(("layer",))[0] == (AXIS,)

    def run(self, weights: list[Any], x: jax.Array, context: Any, chunk: jax.Array, remat: Any) -> jax.Array:
        """One chunk's layers, one after the other."""
        mine = jnp.asarray(self.order)[jax.lax.axis_index(AXIS), chunk]
        kinds = jnp.asarray(self.kind_of_layer)[mine]

        def one(x: jax.Array, leaves: list[Any], index: jax.Array, kind: jax.Array) -> jax.Array:
            key = None if context.key is None else jax.random.fold_in(context.key, index)

            def branch(treedef: Any) -> Any:
                return lambda x, leaves: treedef.unflatten(leaves)(x, context._replace(key=key))

            branches = [branch(treedef) for treedef in self.treedefs]
            y = branches[0](x, leaves) if len(branches) == 1 else jax.lax.switch(kind, branches, x, leaves)
            return y if (self.order >= 0).all() else jnp.where(index >= 0, y, x)

        layer = rematerialise(one, remat)
        return scan_layers(lambda x, scanned: layer(x, *scanned), x, (weights, mine, kinds), may_unroll=False)

    def returned(self, gradients: list[Any]) -> Any:
        """Gradients like `weights`, as the stacks in storage."""
        flat = [self._taken_back(gradient, axes) for gradient, axes in zip(gradients, self.axes)]
        return _by_stack(self.stacks, flat)

    def _split_dim(self, axes: Axes) -> int | None:
        """The dimension that is split over stages in storage, besides the layers."""
        return next((dim for dim, stored in enumerate(self.layout.storage(axes)) if AXIS in stored), None)

    def _brought(self, leaf: jax.Array, axes: Axes) -> Any:
        chunks, slots = self.order.shape[1:]
        dim = self._split_dim(axes)
        once = self.layout.zero != "3"
        gathers = self._gathers(axes)
        value = leaf.astype(self.dtype) if once and (any(gathers) or (dim is not None and not self.rest)) else leaf
        if not self.rest:
            order = np.maximum(self.order, 0)
            if dim is None:
                value = value[jnp.asarray(order.reshape(len(order), -1))[jax.lax.axis_index(AXIS)]]
            else:
                value = jax.lax.all_to_all(value[order.reshape(-1)], AXIS, split_axis=0, concat_axis=dim, tiled=True)

        def by_chunk(x: jax.Array) -> jax.Array:
            return x.reshape(chunks, slots, *x.shape[1:])

        if value.dtype == leaf.dtype and not (once and any(gathers)):
            return by_chunk(value)
        scattered = self.layout.zero == "2"
        whole = gather_dims(value, gathers) if once else value
        slot = jnp.zeros(value.shape if scattered else whole.shape, leaf.dtype)
        return Weight(by_chunk(whole), by_chunk(slot), scattered)

    def _taken_back(self, gradient: jax.Array, axes: Axes) -> jax.Array:
        gradient = gradient.reshape(-1, *gradient.shape[2:])
        if self.layout.zero == "1":
            gradient = scatter_dims(gradient, self._gathers(axes))
        if self.rest:
            return gradient
        dim, order = self._split_dim(axes), self.order.reshape(len(self.order), -1)
        count = len(self.kind_of_layer)
        if dim is None:
            places = jnp.asarray(np.where(order < 0, count, order))[jax.lax.axis_index(AXIS)]
        else:
            gradient = jax.lax.all_to_all(gradient, AXIS, split_axis=dim, concat_axis=0, tiled=True)
            places = np.where(order < 0, count, order).reshape(-1)
        return jnp.zeros((count, *gradient.shape[1:]), gradient.dtype).at[places].set(gradient, mode="drop")

    def _gathers(self, axes: Axes) -> tuple[tuple[str, ...], ...]:
        with use_layout(self.layout.without(AXIS)):
            return gathers_of(axes)


def _by_layer(stacks: Any) -> list[jax.Array]:
    """For each leaf of a block: all layers' arrays in the order of the layers."""
    parts: list[list[jax.Array]] = []
    for stack in stacks:
        places = [jax.tree.leaves(block) for block in stack.blocks]
        parts.append(
            [
                leaves[0] if len(places) == 1 else jnp.stack(leaves, axis=1).reshape(-1, *leaves[0].shape[1:])
                for leaves in zip(*places)
            ]
        )
    return parts[0] if len(parts) == 1 else [jnp.concatenate(leaves) for leaves in zip(*parts)]


def _by_stack(stacks: Any, leaves: list[jax.Array]) -> Any:
    """The inverse of `_by_layer`, in the structure of `stacks`."""
    start, found = 0, []
    for stack in stacks:
        period = len(stack.blocks)
        local = jax.tree.leaves(stack.blocks[0])[0].shape[0] * period
        mine = [leaf[start : start + local] for leaf in leaves]
        blocks = tuple(
            jax.tree.structure(block).unflatten([leaf[place::period] for leaf in mine])
            for place, block in enumerate(stack.blocks)
        )
        found.append(dataclasses.replace(stack, blocks=blocks))
        start += local
    return tuple(found)
