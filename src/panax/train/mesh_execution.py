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
from ..comms.reduction import Residuals
from ..core import Axes, Batch, Evaluation, Gradients, Task, current_layout, map_axes, pair_axes, path_name
from ..core.layout.declarations import tag_comm
from ..core.layout.layout import Layout, use_global_arrays
from ..core.loss_scale import use_loss_scale
from ..core.measures import merged_fields, merges_by_max
from ..mesh.placement import partition_entries
from ..mesh.rules import MESH_AXES
from ..spmd import compute_grads, merge_over_devices, token_axes
from ..spmd.manual import map_over_shards
from ..spmd.overlapped_grad_reduce import GradReduceOverlap, overlap_grad_reduce
from ..spmd.sharding_marks import ValueState, check_sharding
from ..spmd.step_gather import gather_params_per_step, reduce_grads
from .loss_scaling import unscale_gradients
from .reductions.chain import choose_reduction
from .reductions.early_sum import check_share, early_sums
from .reductions.reduction import GradientTerms
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientRule:
    """How the gradients of a global batch are computed.

    Attributes:
        trainable: A tree of bools with the structure of the parameters.
        micro_batches: Number of parts in which the batch is processed sequentially.
        comms: How gradients are summed over the slow network, if compressed or delayed; None for plain sums.
        tables: The tables among the parameters, with row gradients; None if there are none.
    """

    task: Task
    trainable: Any
    micro_batches: int = 1
    comms: Comms | None = None
    tables: TableUpdates | None = None

    @property
    def dense_mask(self) -> Any:
        """Tree of bools with the structure of the parameters: True for trained parameters that are not
        tables."""
        return self.trainable if self.tables is None else self.tables.dense_mask(self.trainable)


class GradientInputs(NamedTuple):
    """Arrays from which gradients are computed, global or as one device's shards.

    Attributes:
        loss_scale: Factor of the loss during differentiation, divided out of the gradients; None for none.
        residuals: Residuals of compressed sums.
        step: Step number, the seed of stochastic rounding; with `comms` only.
        delayed: The previous batch's terms, with delayed gradients.
    """

    params: Any
    model_state: Any
    batch: Batch
    key: jax.Array
    loss_scale: jax.Array | None = None
    residuals: Residuals = None
    step: jax.Array | None = None
    delayed: Terms | None = None


def compute_mesh_gradients(
    rule: GradientRule, inputs: GradientInputs, axes: BatchAxes
) -> tuple[Gradients, Residuals, Terms | None]:
    """Compute `task.gradients` over all micro-batches of a global batch, merged over devices, in the storage
    sharding.

    Args:
        axes: The logical axes of each leaf of the batch.

    Returns:
        The gradients, the new residuals, and, with delayed gradients, this batch's terms.
    """
    layout, task, tables = current_layout(), rule.task, rule.tables
    if layout is None or not task.names_axes:
        with use_global_arrays(), use_loss_scale(inputs.loss_scale):
            rows = None if tables is None else tables.gather_rows(task, inputs.params, inputs.batch)
            gradients = _compute_terms(rule, inputs, inputs.params if rows is None else rows.params, rows)
        gradients = gradients._replace(gradients=unscale_gradients(gradients.gradients, inputs.loss_scale))
        return gradients, None, None
    parameter_axes = task.parameter_axes(inputs.params)

    def local(shards: GradientInputs) -> tuple[Gradients, Residuals, Terms | None]:
        comms = rule.comms
        rows = None if tables is None else tables.gather_rows(task, shards.params, shards.batch)
        gathered = _gathered_once(task, layout, shards.params if rows is None else rows.params, parameter_axes)
        early = None if comms is None else early_sums(shards.params, parameter_axes, comms, shards.residuals, layout)
        with use_loss_scale(shards.loss_scale), overlap_grad_reduce(early):
            result = _compute_terms(rule, shards, gathered, rows)
        terms = unscale_gradients(reduce_grads(result.gradients, parameter_axes), shards.loss_scale)
        sums = _reduce_once(layout, terms, parameter_axes, rule, shards, early)
        merged = _merged(result.losses, result.state, result.metrics)
        return Gradients(sums.sums, *merged, result.rows), sums.residuals, sums.delayed

    specs = _specs(layout, task, inputs.params, inputs.model_state, inputs.batch, axes)
    row_specs = None if tables is None else tables.gradient_specs(layout)
    free = jax.tree.map(
        lambda spec, is_trained: spec if is_trained else None, specs[0], rule.dense_mask, is_leaf=_is_spec
    )
    out = Gradients(free, PartitionSpec(), specs[1], PartitionSpec(), row_specs)  # pyright: ignore[reportArgumentType]
    named = {name: leaf_axes for name, _, leaf_axes in pair_axes(inputs.params, parameter_axes)}

    def of_replicas(arrays: Mapping[str, Any] | None) -> Any:
        # Each replica holds its own value: one more dimension, over the axes of the slow network.
        if arrays is None or rule.comms is None:
            return None
        over = rule.comms.over
        return {name: PartitionSpec(*over, *partition_entries(layout.storage(named[name]))) for name in arrays}

    residuals, delayed = of_replicas(inputs.residuals), of_replicas(inputs.delayed)
    shardings = GradientInputs(*specs, PartitionSpec(), residuals, PartitionSpec(), delayed)  # pyright: ignore[reportArgumentType]
    arrays = inputs._replace(batch=dict(inputs.batch))
    return map_over_shards(local, layout, (shardings,), (out, residuals, delayed))(arrays)


def _compute_terms(rule: GradientRule, inputs: GradientInputs, gathered: Any, rows: GatheredTables | None) -> Gradients:
    """Compute the gradients with respect to gathered parameters, before any reduction over devices."""
    parts = split_rows(inputs.batch, rule.micro_batches)
    result = compute_grads(rule.task, gathered, inputs.model_state, parts, inputs.key, rule.trainable)
    return _with_rows(result, rows, inputs.loss_scale)


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


def _specs(
    layout: Layout, task: Task, params: Any, model_state: Any, batch: Batch, axes: BatchAxes
) -> tuple[Any, Any, Any, Any]:
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
    if not layout.zero.gathers_per_step or layout.sizes["stage"] > 1:
        return params
    return gather_params_per_step(params, axes, task.weight_dtype, scattered=not layout.zero.scatters_per_step)


def _reduce_once(
    layout: Layout,
    gradients: Any,
    axes: Any,
    rule: GradientRule,
    inputs: GradientInputs,
    early: GradReduceOverlap | None,
) -> ReducedGradients:
    """Reduce gradients once per step, over all mesh axes that do not shard a parameter, unless already
    reduced in the backward pass."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(gradients, is_leaf=lambda g: g is None)
    values: dict[str, Any] = {}
    named_axes, rest = {}, {}
    for (path, gradient), leaf_axes in zip(leaves, treedef.flatten_up_to(axes)):
        name = path_name(path)
        values[name] = gradient
        if gradient is None:
            continue
        named_axes[name] = tuple(leaf_axes)
        if early is None or name not in early.received:
            values[name], rest[name] = check_share(name, gradient, named_axes[name], layout)
    terms = GradientTerms(values, rest, named_axes, inputs.step, inputs.residuals, inputs.delayed, early)
    with tag_comm("gradients once a step"):
        terms = choose_reduction(rule.comms).reduce(terms, layout)
    return ReducedGradients(treedef.unflatten([terms.values[name] for name in values]), terms.residuals, terms.delayed)


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
