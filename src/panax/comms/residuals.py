"""Residuals of compressed reductions (error feedback): their specs, and resharding for another number of
replicas.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ..core.errors import RecipeError
from ..core.layout.layout import Layout
from ..core.protocols import Axes
from ..core.task import Task
from .reduction import RowViews, compressed_views
from .settings import AUTO, Comms

ResidualSpecs = dict[str, tuple[jax.ShapeDtypeStruct, Axes]]


def per_device_axis(axis: str) -> str:
    """Return the logical axis of values that each device along a mesh axis stores separately."""
    return f"each_{axis}"


def check_mesh(
    comms: Comms, parameters: Mapping[str, tuple[tuple[int, ...], Axes]], layout: Layout, task: Task
) -> None:
    """Check that the mesh and the task support the requested compression or delay of gradients.

    Args:
        parameters: Trainable parameters, name to (shape, logical axes).

    Raises:
        RecipeError: The mesh or the task does not; the message names the setting to change.
    """
    setting = comms.active_setting
    if not task.names_axes:
        raise RecipeError(
            f"{setting}: {type(task).__name__} names no axes, so XLA partitions its program and reduces its gradients; "
            f"remove comms"
        )
    if comms.over == (AUTO,):
        raise RecipeError(
            f'{setting}: comms.over="auto" is resolved by `panax train`, `fit` and `compile_step`; name the axes here'
        )
    if math.prod(layout.sizes[axis] for axis in comms.over) == 1:
        raise RecipeError(
            f"{setting} has no effect: the mesh has {' and '.join(f'{axis}=1' for axis in comms.over)}; set "
            f"mesh.{comms.over[0]}, name other axes in comms.over, or remove comms"
        )
    for name, (shape, axes) in parameters.items():
        split = {axis for dim in layout.storage(axes, shape) for axis in dim}
        for axis in comms.over:
            if axis in split:
                raise RecipeError(
                    f"comms.over: {name} is sharded over {axis}, so its gradient is reduce-scattered there in the "
                    f"backward pass, not reduced once per step; remove {axis} from comms.over"
                )
    if comms.compress and not _row_views(comms, parameters, layout):
        raise RecipeError(
            f"{setting} has no effect: no parameter is large and regular enough to be cut into quantization "
            f"blocks; remove comms"
        )


def residual_specs(
    comms: Comms, parameters: Mapping[str, tuple[tuple[int, ...], Axes]], layout: Layout
) -> ResidualSpecs:
    """Return, by parameter name, the shape and logical axes of each residual.

    Args:
        parameters: Trainable parameters, name to (shape, logical axes).
    """
    if not comms.compress or not comms.error_feedback:
        return {}
    cut = _row_views(comms, parameters, layout)
    front = tuple(layout.sizes[axis] for axis in comms.over)
    return {
        name: (jax.ShapeDtypeStruct((*front, *shape), jnp.float32), (*map(per_device_axis, comms.over), *axes))
        for name, (shape, axes) in parameters.items()
        if name in cut
    }


def reshard_residual(residual: jax.Array, num_dims: int, replicas: tuple[int, ...]) -> jax.Array:
    """Reshard residuals for another number of replicas: residuals of merged replicas are added, those of split
    replicas divided; the sum is unchanged.

    Args:
        residual: Residual with the replicas' dimensions leading.
        num_dims: Number of dimensions of the parameter.
        replicas: The new leading dimensions.

    >>> reshard_residual(jnp.array([[1.0], [2.0], [3.0], [4.0]]), 1, (2,)).tolist()
    [[3.0], [7.0]]
    >>> reshard_residual(jnp.array([[2.0]]), 1, (2,)).tolist()
    [[1.0], [1.0]]
    """
    shape = residual.shape[residual.ndim - num_dims :]
    flat = residual.reshape(-1, *shape)
    before, after = flat.shape[0], math.prod(replicas)
    if before % after == 0:
        resharded = flat.reshape(after, before // after, *shape).sum(1)
    elif after % before == 0:
        resharded = jnp.repeat(flat / (after // before), after // before, axis=0)
    else:
        resharded = jnp.broadcast_to(flat.sum(0) / after, (after, *shape))
    return resharded.reshape(*replicas, *shape)


def _row_views(comms: Comms, parameters: Mapping[str, tuple[tuple[int, ...], Axes]], layout: Layout) -> RowViews:
    def shard(shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
        axes_by_dim = layout.storage(axes)
        return tuple(size // math.prod(layout.sizes[axis] for axis in dim) for size, dim in zip(shape, axes_by_dim))

    return compressed_views(
        {name: (shard(shape, axes), axes) for name, (shape, axes) in parameters.items()}, comms, layout
    )
