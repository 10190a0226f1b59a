"""Gradient reduction during the backward pass, layer by layer, as requested by `comms.sums`."""

import math
from typing import Any

import jax

from ...comms import Comms
from ...comms.reduction import Residuals, reduce_compressed
from ...comms.rows import RowView
from ...core import Axes, Task, pair_axes
from ...core.errors import RecipeError
from ...core.layout.declarations import tag_comm
from ...core.layout.layout import Layout
from ...core.params.logical import Role, axis_for_role
from ...mesh.rules import MESH_AXES, MeshAxes
from ...spmd.collectives import all_reduce
from ...spmd.overlapped_grad_reduce import GradReduceOverlap
from ...spmd.sharding_marks import ValueState, check_sharding


def check_sums(comms: Comms, task: Task, layout: Layout) -> None:
    """Check that the mesh and the task support reduction during the backward pass.

    Raises:
        RecipeError: The mesh or the task does not support it; the message names the fix.
    """
    if comms.sums == "at_end":
        return
    setting = f'comms.sums="{comms.sums}"'
    if not task.names_axes:
        raise RecipeError(
            f"{setting}: {type(task).__name__} names no axes, so XLA schedules its gradient sums; remove comms.sums"
        )
    if layout.sizes["replica"] * layout.sizes["context"] == 1:
        raise RecipeError(
            f"{setting} has no effect: with replica=1 and context=1 gradients of layers are scattered as they are formed, and "
            f"not added up; remove comms.sums"
        )
    if layout.sizes["stage"] > 1:
        raise RecipeError(
            f"{setting}: stages of a pipeline add their gradients up after its last tick; set mesh.stage=1, or remove comms.sums"
        )
    if layout.zero.scatters_per_step:
        raise RecipeError(
            f'{setting} with rules.zero="1", which scatters gradients once a step; set it to "2" or "3", or remove comms.sums'
        )
    if comms.compress and task.scales_loss:
        raise RecipeError(
            f"{setting} with comms.compress: gradients of a loss scaled for float16 still have its factor, unlike the "
            "residuals; remove "
            f"one of the two, or set task.compute_dtype to bfloat16"
        )


def early_sums(params: Any, axes: Any, comms: Comms, residuals: Residuals, layout: Layout) -> GradReduceOverlap | None:
    """Return the reductions to run during the backward pass; None if all run after it.

    Args:
        params: A device's shards.
        axes: The logical axes at each leaf, with the structure of `params`.
        residuals: A device's residuals, with leading dimensions of 1.
    """
    if comms.sums == "at_end":
        return None
    owners = math.prod(layout.sizes[axis] for axis in comms.over)
    named = {
        name: (leaf, leaf_axes)
        for name, leaf, leaf_axes in pair_axes(params, axes)
        if leaf_axes and leaf_axes[0] == axis_for_role(Role.LAYERS)
    }
    ways: dict[str, RowView] = {}
    alone = set()
    for name, (leaf, leaf_axes) in named.items():
        if not comms.compress or RowView.of(name, leaf.shape, leaf_axes, layout, owners) is None:
            alone.add(name)
        elif (rows := RowView.of(name, leaf.shape[1:], leaf_axes[1:], layout, owners)) is not None:
            ways[name] = rows
    # If a single layer is too small to be split, though its stack is not, the stack is reduced at the end.
    names = frozenset(alone | ways.keys())
    front = {} if residuals is None else {name: residuals[name].reshape(named[name][0].shape) for name in ways}

    def reduce(name: str, gradient: jax.Array, left: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        share, over = check_share(name, gradient, named[name][1][1:], layout)
        with tag_comm("gradients in the backward pass"):
            if name not in ways:
                return all_reduce(share, over), left
            share = all_reduce(share, tuple(axis for axis in over if axis not in comms.over))
            before = None if left is None else {name: left}
            # The step counter seeds stochastic rounding, which is rejected here.
            sums, after = reduce_compressed(
                {name: share}, {name: ways[name]}, before, comms, layout, jax.numpy.int32(0)
            )
            return sums[name], None if after is None else after[name]

    def reduce_whole(name: str, gradient: jax.Array) -> jax.Array:
        share, over = check_share(name, gradient, named[name][1], layout)
        with tag_comm("gradients in the backward pass"):
            return all_reduce(share, over)

    return GradReduceOverlap(reduce, reduce_whole, names, front, of_each=comms.sums == "each_micro_batch")


def early_residuals(early: GradReduceOverlap | None, name: str, before: jax.Array) -> jax.Array:
    """Return a parameter's residuals from the backward pass, in the shape of the state."""
    assert early is not None
    return early.residuals[name].reshape(before.shape)


def check_share(name: str, gradient: jax.Array, axes: Axes, layout: Layout) -> tuple[jax.Array, MeshAxes]:
    """Return a gradient in its storage sharding, checked to be this device's share, and the mesh axes to sum
    it over."""
    stored = {axis for dim in layout.storage(axes) for axis in dim}
    rest = tuple(axis for axis in MESH_AXES if layout.sizes[axis] > 1 and axis not in stored)
    holds = dict.fromkeys(stored, (ValueState.SPLIT, ValueState.WHOLE)) | dict.fromkeys(rest, (ValueState.PARTIAL,))
    return check_sharding(gradient, holds, f"the gradient of {name}"), rest
