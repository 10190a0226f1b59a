"""An engine's programs on a mesh: each group of devices has a part of the rows, and a shard of the weights."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from ..core import Task, map_axes
from ..core.layout.layout import use_layout
from ..core.protocols import Axes, IncrementalModel
from ..kernels import Kernels, use_kernels
from ..mesh.placement import Placement, partition_entries
from ..mesh.rules import MeshAxes
from ..spmd import token_axes
from ..spmd.collectives import all_gather
from ..spmd.manual import map_over_shards


class ProgramSettings(NamedTuple):
    """What programs are compiled for, besides the shapes of their arguments.

    Attributes:
        placement: The mesh, and the sharding rules for generation; None for one device.
        kernels: The kernels that the recipe names.
        kept: Maximum number of tokens among which each one is drawn, if they are recorded; 0 if not.
    """

    placement: Placement | None = None
    kernels: Kernels = Kernels()
    kept: int = 0


def count_row_groups(placement: Placement | None) -> int:
    """Return the number of groups of devices that have different rows."""
    if placement is None:
        return 1
    count = 1
    for axis in _row_axes(placement):
        count *= placement.sizes[axis]
    return count


def row_spec(placement: Placement | None) -> PartitionSpec:
    """Return the spec of an array that begins with the axis of rows."""
    return PartitionSpec() if placement is None else PartitionSpec(*partition_entries((_row_axes(placement),)))


def model_specs(placement: Placement | None, model: IncrementalModel) -> Any:
    """Return the specs of a model's arrays."""
    axes = None if placement is None else model.axes
    return PartitionSpec() if axes is None else _specs(placement, model, axes)


def cache_specs(placement: Placement | None, model: IncrementalModel) -> Any:
    """Return the specs of a cache's arrays."""
    axes = None if placement is None else model.cache_axes
    if axes is None:
        return row_spec(placement)
    return _specs(placement, jax.eval_shape(lambda: model.empty_cache(1, 1)), axes)


def map_rows(
    function: Callable[..., Any], settings: ProgramSettings, arguments: Any, results: Any
) -> Callable[..., Any]:
    """Run `function` on each device's shards; on one device, as it is.

    Args:
        arguments, results: As for `map_over_shards`.
    """
    placement = settings.placement

    def run(*inputs: Any) -> Any:
        with use_kernels(settings.kernels.names):
            if placement is None:
                return function(*inputs)
            with use_layout(placement):
                return map_over_shards(function, placement, arguments, results)(*inputs)

    return run


def gather_rows(tree: Any) -> Any:
    """Return arrays of a device's rows with those of all devices, so that each process can read them."""
    axes = token_axes()
    return jax.tree.map(lambda leaf: all_gather(leaf, axes, 0), tree) if axes else tree


@functools.partial(jax.jit, static_argnums=(0, 3))
def create_model(task: Task, params: Any, state: Any, dtype: str) -> IncrementalModel:
    """Create a model on one device, in one program; arrays that it takes as they are share their memory.

    Args:
        state, dtype: See `Task.incremental_model`.
    """
    return task.incremental_model(params, state, dtype)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def place_model(task: Task, params: Any, state: Any, dtype: str, placement: Placement) -> IncrementalModel:
    """Create a model on a mesh from parameters on the same devices, each gathered and cast once.

    Args:
        state: The task's model state.
        dtype: See `Task.incremental_model`.
        placement: See `Placement.for_generation`.
    """
    model = task.incremental_model(params, state, dtype)
    shardings = jax.tree.map(lambda spec: placement.sharding(*spec), model_specs(placement, model), is_leaf=_is_spec)
    return jax.lax.with_sharding_constraint(model, shardings)


def _specs(placement: Placement | None, tree: Any, axes: Any) -> Any:
    def spec(_: Any, leaf_axes: Axes) -> PartitionSpec:
        return PartitionSpec() if placement is None else PartitionSpec(*partition_entries(placement.compute(leaf_axes)))

    return map_axes(spec, tree, axes)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def _row_axes(placement: Placement) -> MeshAxes:
    return placement.compute(("batch",))[0]
