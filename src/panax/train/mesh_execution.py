"""Execution of a task's functions on a mesh.

A task that names its axes (`Task.names_axes`) is traced for one device: one `shard_map` over every mesh axis,
in which arrays are a device's shards, and all communication comes from `contract`, `gather` and the layers.
Nothing is left to a partitioner, so the bytes on the wire are those of the stated algorithm. Any other task
sees global arrays, and XLA partitions it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..comms import Comms
from ..comms.delayed_gradients import Terms
from ..comms.reduction import Residuals, compressed_views, reduce_compressed
from ..core import Axes, Batch, Evaluation, Gradients, Task, current_layout, map_axes, pair_axes, path_name
from ..core.layout.declarations import tag_comm
from ..core.layout.layout import Layout, use_global_arrays
from ..core.loss_scale import use_loss_scale
from ..core.measures import merged_fields, merges_by_max
from ..mesh.placement import partition_entries
from ..mesh.rules import MESH_AXES
from ..spmd import compute_grads, merge_over_devices, token_axes
from ..spmd.collectives import all_reduce
from ..spmd.manual import map_over_shards
from ..spmd.overlapped_grad_reduce import GradReduceOverlap, overlap_grad_reduce
from ..spmd.sharding_marks import ValueState, assert_sharding, check_sharding
from ..spmd.step_gather import gather_params_per_step, reduce_grads
from .loss_scaling import unscale_gradients
from .overlapped_grads import check_share, early_residuals, early_sums
from .tables import GatheredTables, TableUpdates, scale_rows

BatchAxes = Mapping[str, Axes]


class ReducedGradients(NamedTuple):
    """Result of a step's gradient reduction over devices.

    Attributes:
        sums: A tree with the structure of the gradients.
        residuals: The new residuals of compressed sums.
        delayed: With delayed gradients, this batch's terms; `sums` are then the previous batch's.
    """

    sums: Any
    residuals: Residuals
    delayed: Terms | None


def compute_mesh_gradients(
    task: Task,
    params: Any,
    model_state: Any,
    batch: Batch,
    key: jax.Array,
    trainable: Any,
    parts: int,
    axes: BatchAxes,
    scale: jax.Array | None = None,
    comms: Comms | None = None,
    owed: Residuals = None,
    count: jax.Array | None = None,
    late: Terms | None = None,
    tables: TableUpdates | None = None,
) -> tuple[Gradients, Residuals, Terms | None]:
    """Compute `task.gradients` over all `parts` micro-batches of a global batch, merged over devices, in the
    storage sharding.

    Args:
        scale: Factor of the loss during differentiation, divided out of the gradients; None for none.
        comms: How gradients are summed over the slow network.
        owed: Residuals of compressed sums.
        count: Step counter; with `comms` only.
        late: The previous batch's terms, with delayed gradients.
        tables: The tables among the parameters.

    Returns:
        The gradients, the new residuals, and, with delayed gradients, this batch's terms.
    """
    layout = current_layout()
    if layout is None or not task.names_axes:
        with use_global_arrays(), use_loss_scale(scale):
            opened = None if tables is None else tables.gather_rows(task, params, batch)
            gathered = params if opened is None else opened.params
            gradients = compute_grads(task, gathered, model_state, split_rows(batch, parts), key, trainable)
            gradients = _with_rows(gradients, opened, scale)
        return gradients._replace(gradients=unscale_gradients(gradients.gradients, scale)), None, None
    parameter_axes = task.parameter_axes(params)

    def local(
        params: Any,
        model_state: Any,
        batch: Batch,
        key: jax.Array,
        scale: jax.Array | None,
        owed: Residuals,
        count: jax.Array | None,
        late: Terms | None,
    ) -> tuple[Gradients, Residuals, Terms | None]:
        read = None if tables is None else tables.gather_rows(task, params, batch)
        opened = _gathered_once(task, layout, params if read is None else read.params, parameter_axes)
        early = None if comms is None else early_sums(params, parameter_axes, comms, owed, layout)
        with use_loss_scale(scale), overlap_grad_reduce(early):
            result = compute_grads(task, opened, model_state, split_rows(batch, parts), key, trainable)
            result = _with_rows(result, read, scale)
        shares = reduce_grads(result.gradients, parameter_axes)
        sums = _summed(layout, unscale_gradients(shares, scale), parameter_axes, comms, owed, count, late, early)
        merged = _merged(result.losses, result.state, result.metrics)
        return Gradients(sums.sums, *merged, result.rows), sums.residuals, sums.delayed

    specs = _specs(layout, task, params, model_state, batch, axes)
    dense, rows = trainable, None
    if tables is not None:
        dense, rows = tables.dense_mask(trainable), tables.gradient_specs(layout)
    free = jax.tree.map(lambda spec, keep: spec if keep else None, specs[0], dense, is_leaf=_is_spec)
    out = Gradients(free, PartitionSpec(), specs[1], PartitionSpec(), rows)  # pyright: ignore[reportArgumentType]
    named = {name: leaf_axes for name, _, leaf_axes in pair_axes(params, parameter_axes)}

    def of_replicas(kept: Mapping[str, Any] | None) -> Any:
        if kept is None or comms is None:
            return None
        return {name: PartitionSpec(*comms.over, *partition_entries(layout.storage(named[name]))) for name in kept}

    lies = of_replicas(owed), of_replicas(late)
    specs = (*specs, PartitionSpec(), lies[0], PartitionSpec(), lies[1])
    arguments = (params, model_state, dict(batch), key, scale, owed, count, late)
    return map_over_shards(local, layout, specs, (out, *lies))(*arguments)


def _with_rows(found: Gradients, opened: GatheredTables | None, scale: jax.Array | None) -> Gradients:
    """Separate the unscaled row gradients of tables from the other gradients."""
    if opened is None:
        return found
    dense, rows = opened.split_gradients(found.gradients)
    rows = rows if scale is None else scale_rows(rows, 1 / scale)
    return found._replace(gradients=dense, rows=rows)


def evaluate_on_mesh(
    task: Task,
    params: Any,
    model_state: Any,
    batch: Batch,
    key: jax.Array,
    axes: BatchAxes,
    tables: TableUpdates | None = None,
) -> Evaluation:
    """Compute `task.loss` of a global batch outside of training, merged over devices."""
    layout = current_layout()
    if layout is None or not task.names_axes:
        with use_global_arrays():
            return task.loss(params, model_state, batch, key, False)

    def local(params: Any, model_state: Any, batch: Batch, key: jax.Array) -> Evaluation:
        opened = params if tables is None else tables.gather_rows(task, params, batch).params
        return Evaluation(*_merged(*task.loss(opened, model_state, batch, key, False)))

    specs = _specs(layout, task, params, model_state, batch, axes)
    out = Evaluation(PartitionSpec(), specs[1], PartitionSpec())  # pyright: ignore[reportArgumentType]
    return map_over_shards(local, layout, specs, out)(params, model_state, dict(batch), key)


def split_rows(batch: Batch, parts: int) -> dict[str, Any]:
    """Split every leaf into micro-batches along a new first axis; row r goes to part r % parts, so no row
    changes its device."""

    def one(leaf: jax.Array) -> jax.Array:
        if parts == 1:
            return leaf[None]
        return leaf.reshape(leaf.shape[0] // parts, parts, *leaf.shape[1:]).swapaxes(0, 1)

    return {name: one(leaf) for name, leaf in batch.items()}


def _specs(layout: Layout, task: Task, params: Any, model_state: Any, batch: Batch, axes: BatchAxes) -> tuple:
    def stored(tree: Any, tree_axes: Any) -> Any:
        return map_axes(lambda _, a: PartitionSpec(*partition_entries(layout.storage(a))), tree, tree_axes)

    rows = {name: PartitionSpec(*partition_entries(layout.compute(axes[name]))) for name in batch}
    return (
        stored(params, task.parameter_axes(params)),
        stored(model_state, task.state_axes(model_state)),
        rows,
        PartitionSpec(),
    )


def _gathered_once(task: Task, layout: Layout, params: Any, axes: Any) -> Any:
    # A pipeline moves its layers to their stages first, and gathers them itself.
    if layout.zero == "3" or layout.sizes["stage"] > 1:
        return params
    return gather_params_per_step(params, axes, task.weight_dtype, scattered=layout.zero == "2")


def _summed(
    layout: Layout,
    gradients: Any,
    axes: Any,
    comms: Comms | None,
    owed: Residuals,
    count: jax.Array | None,
    late: Terms | None,
    early: GradReduceOverlap | None,
) -> ReducedGradients:
    """Reduce gradients once per step, over all mesh axes that do not shard a parameter, unless already
    reduced in the backward pass."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(gradients, is_leaf=lambda g: g is None)
    named = {path_name(path): (g, a) for (path, g), a in zip(leaves, treedef.flatten_up_to(axes))}
    sums: dict[str, Any] = {name: None for name, (gradient, _) in named.items() if gradient is None}
    rest = {}
    met = set() if early is None else early.met
    for name, (gradient, leaf_axes) in named.items():
        if name in met:
            sums[name] = gradient
        elif gradient is not None:
            sums[name], rest[name] = check_share(name, gradient, tuple(leaf_axes), layout)
    terms = None
    with tag_comm("gradients once a step"):
        # Delayed gradients: reduce this batch's over the fast axes, and the previous batch's over the slow ones.
        if late is not None and comms is not None:
            terms = {}
            for name, slow in rest.items():
                fast = tuple(axis for axis in slow if axis not in comms.over)
                partial_sum = assert_sharding(all_reduce(sums[name], fast), dict.fromkeys(comms.over, ValueState.OWN))
                terms[name] = partial_sum.reshape(late[name].shape)
                before = late[name].reshape(partial_sum.shape)
                rest[name] = tuple(axis for axis in slow if axis in comms.over)
                sums[name] = assert_sharding(before, dict.fromkeys(rest[name], ValueState.PARTIAL))
        if comms is not None and comms.compress and count is not None:
            ways = compressed_views({name: (sums[name].shape, tuple(named[name][1])) for name in rest}, comms, layout)
            for name in ways:
                # Reduce over the fast network first, so that the slow one carries each sum once.
                sums[name] = all_reduce(sums[name], tuple(axis for axis in rest[name] if axis not in comms.over))
            left = None if owed is None else {name: owed[name] for name in ways}
            reduced, left = reduce_compressed({name: sums[name] for name in ways}, ways, left, comms, layout, count)
            if owed is not None and left is not None:
                owed = {name: left[name] if name in left else early_residuals(early, name, owed[name]) for name in owed}
            sums, rest = {**sums, **reduced}, {name: axes for name, axes in rest.items() if name not in ways}
        sums |= {name: all_reduce(sums[name], axes) for name, axes in rest.items()}
    if terms is not None:
        # Tie both together: the sums travel while this batch is processed, and are used only after it, in place.
        sums, terms = jax.lax.optimization_barrier((sums, terms))
    return ReducedGradients(treedef.unflatten([sums[name] for name in named]), owed, terms)


def _merged(losses: Any, model_state: Any, metrics: Any) -> tuple[Any, Any, Any]:
    axes = token_axes()
    losses, metrics = _expected_of_tokens(losses, "loss"), _expected_of_tokens(metrics, "metric")
    with tag_comm("losses and metrics"):
        return merge_over_devices(losses, axes), model_state, merge_over_devices(metrics, axes)


def _expected_of_tokens(measures: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Check that each device's measures cover its own tokens, and that devices with the same tokens agree."""
    elsewhere = dict.fromkeys(MESH_AXES, (ValueState.WHOLE,))

    def one(name: str, measure: Any) -> Any:
        def checked(field: str) -> Any:
            value = jnp.asarray(getattr(measure, field))
            of_tokens = (
                (ValueState.SPLIT, ValueState.WHOLE, ValueState.OWN)
                if merges_by_max(measure)
                else (ValueState.PARTIAL,)
            )
            if not jnp.issubdtype(value.dtype, jnp.inexact):
                # Integer counts are not tracked as partial sums; a count over local tokens is a device's own value.
                of_tokens = (*of_tokens, ValueState.OWN)
            return check_sharding(
                value, elsewhere | dict.fromkeys(token_axes(), of_tokens), f"the {field} of {kind} {name!r}"
            )

        return dataclasses.replace(measure, **{field: checked(field) for field in merged_fields(measure)})

    return {name: one(name, measure) for name, measure in measures.items()}


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
