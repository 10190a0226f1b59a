"""A task's work, run on a mesh.

A task that names its axes (`Task.names_axes`) is traced for one device: one `shard_map` over every mesh axis, in which arrays are
a device's shards and all communication is what `contract`, `gather` and the layers ask for. Nothing is left to a partitioner, so
the bytes on the wire are those of the stated algorithm. Any other task sees whole arrays, and XLA decides.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..core import Axes, Batch, Evaluation, Gradients, Task, current_layout, map_axes, path_name
from ..core.expected import moving
from ..core.layout import Layout, whole_arrays
from ..core.loss_scale import use_loss_scale
from ..core.measures import Maximum
from ..mesh.placement import as_spec
from ..mesh.rules import MESH_AXES
from ..spmd import gradients_of, merge_over_devices, token_axes
from ..spmd.collectives import all_reduce
from ..spmd.marks import Holds, expected
from ..spmd.once import closed_gradients, gathered_once

BatchAxes = Mapping[str, Axes]


def gradients(
    task: Task,
    params: Any,
    model_state: Any,
    batch: Batch,
    key: jax.Array,
    trainable: Any,
    parts: int,
    axes: BatchAxes,
    scale: jax.Array | None = None,
) -> Gradients:
    """`task.gradients` over all `parts` micro-batches of a global batch, merged over devices, in the storage layout.

    Args:
        scale: The loss is multiplied with it before it is differentiated; None leaves it.
    """
    layout = current_layout()
    if layout is None or not task.names_axes:
        with whole_arrays(), use_loss_scale(scale):
            return gradients_of(task, params, model_state, split_rows(batch, parts), key, trainable)
    parameter_axes = task.parameter_axes(params)

    def local(params: Any, model_state: Any, batch: Batch, key: jax.Array, scale: jax.Array | None) -> Gradients:
        opened = _gathered_once(task, layout, params, parameter_axes)
        with use_loss_scale(scale):
            result = gradients_of(task, opened, model_state, split_rows(batch, parts), key, trainable)
        gradients = _summed(layout, closed_gradients(result.gradients, parameter_axes), parameter_axes)
        return Gradients(gradients, *_merged(result.losses, result.state, result.metrics))

    specs = _specs(layout, task, params, model_state, batch, axes)
    free = jax.tree.map(lambda spec, keep: spec if keep else None, specs[0], trainable, is_leaf=_is_spec)
    out = Gradients(free, PartitionSpec(), specs[1], PartitionSpec())  # pyright: ignore[reportArgumentType]
    specs = (*specs, PartitionSpec())
    return jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)(
        params, model_state, dict(batch), key, scale
    )


def evaluation(task: Task, params: Any, model_state: Any, batch: Batch, key: jax.Array, axes: BatchAxes) -> Evaluation:
    """`task.loss` of a global batch outside of training, merged over devices."""
    layout = current_layout()
    if layout is None or not task.names_axes:
        with whole_arrays():
            return task.loss(params, model_state, batch, key, False)

    def local(params: Any, model_state: Any, batch: Batch, key: jax.Array) -> Evaluation:
        return Evaluation(*_merged(*task.loss(params, model_state, batch, key, False)))

    specs = _specs(layout, task, params, model_state, batch, axes)
    out = Evaluation(PartitionSpec(), specs[1], PartitionSpec())  # pyright: ignore[reportArgumentType]
    return jax.shard_map(local, mesh=layout.mesh, in_specs=specs, out_specs=out, check_vma=False)(
        params, model_state, dict(batch), key
    )


def split_rows(batch: Batch, parts: int) -> dict[str, Any]:
    """Every leaf with a new first axis of micro-batches; row r goes to part r % parts, so no row changes its device."""

    def one(leaf: jax.Array) -> jax.Array:
        if parts == 1:
            return leaf[None]
        return leaf.reshape(leaf.shape[0] // parts, parts, *leaf.shape[1:]).swapaxes(0, 1)

    return {name: one(leaf) for name, leaf in batch.items()}


def _specs(layout: Layout, task: Task, params: Any, model_state: Any, batch: Batch, axes: BatchAxes) -> tuple:
    def stored(tree: Any, tree_axes: Any) -> Any:
        return map_axes(lambda _, a: PartitionSpec(*as_spec(layout.storage(a))), tree, tree_axes)

    rows = {name: PartitionSpec(*as_spec(layout.compute(axes[name]))) for name in batch}
    return (
        stored(params, task.parameter_axes(params)),
        stored(model_state, task.state_axes(model_state)),
        rows,
        PartitionSpec(),
    )


def _gathered_once(task: Task, layout: Layout, params: Any, axes: Any) -> Any:
    # A pipeline brings its layers to their stages first, and gathers them itself.
    if layout.zero == "3" or layout.sizes["stage"] > 1:
        return params
    return gathered_once(params, axes, task.weight_dtype, scattered=layout.zero == "2")


def _summed(layout: Layout, gradients: Any, axes: Any) -> Any:
    """The once-a-step reduction: over all mesh axes that a parameter is not split over."""

    def one(name: str, gradient: Any, leaf_axes: Axes) -> Any:
        stored = {axis for dim in layout.storage(leaf_axes) for axis in dim}
        rest = tuple(axis for axis in MESH_AXES if layout.sizes[axis] > 1 and axis not in stored)
        holds = dict.fromkeys(stored, (Holds.SPLIT, Holds.WHOLE)) | dict.fromkeys(rest, (Holds.PARTIAL,))
        with moving("gradients once a step"):
            return all_reduce(expected(gradient, holds, f"the gradient of {name}"), rest)

    leaves, treedef = jax.tree_util.tree_flatten_with_path(gradients, is_leaf=lambda g: g is None)
    return treedef.unflatten(
        [
            None if g is None else one(path_name(path), g, tuple(a))
            for (path, g), a in zip(leaves, treedef.flatten_up_to(axes))
        ]
    )


def _merged(losses: Any, model_state: Any, metrics: Any) -> tuple[Any, Any, Any]:
    axes = token_axes()
    losses, metrics = _expected_of_tokens(losses, "loss"), _expected_of_tokens(metrics, "metric")
    with moving("losses and metrics"):
        return merge_over_devices(losses, axes), model_state, merge_over_devices(metrics, axes)


def _expected_of_tokens(measures: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Each device's share is of its own tokens; devices that hold the same ones have found the same."""
    elsewhere = dict.fromkeys(MESH_AXES, (Holds.WHOLE,))

    def one(name: str, measure: Any) -> Any:
        of_tokens = (Holds.SPLIT, Holds.WHOLE) if isinstance(measure, Maximum) else (Holds.PARTIAL,)
        holds = elsewhere | dict.fromkeys(token_axes(), of_tokens)
        counted = {
            field: expected(getattr(measure, field), holds, f"the {field} of {kind} {name!r}")
            for field in measure.__dataclass_fields__
            if field != "coefficient"
        }
        return dataclasses.replace(measure, **counted)

    return {name: one(name, measure) for name, measure in measures.items()}


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
