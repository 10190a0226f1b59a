"""The devices of a model's arrays for generation: one device, or a mesh."""

import dataclasses
from typing import Any, NamedTuple

import jax

from ..core import Task, pair_axes
from ..core.errors import LayoutError, RecipeError
from .legality import MeshRequirements, check, fit_rules
from .placement import Placement
from .topology import MeshShape


class ModelPlaces(NamedTuple):
    """A sharding for each array.

    Attributes:
        state: Those of the task's model state.
        placement: The mesh with its rules for generation; None for one device.
    """

    params: Any
    state: Any
    placement: Placement | None


def choose_places(task: Task, params: Any, state: Any, shape: MeshShape | None) -> ModelPlaces:
    """Choose the devices of a model's (abstract) parameters and state: the default device, or a mesh.

    Args:
        shape: Sizes of the mesh axes. `tensor` and `expert` split weights; rows are split over all but `tensor`.

    Raises:
        LayoutError: A weight is not divisible over the mesh, there are not enough devices, or there are stages.
        RecipeError: The task leaves sharding to XLA, and generates on one device.
    """
    if shape is None:
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return ModelPlaces(*jax.tree.map(lambda _: device, (params, state)), placement=None)
    if not task.names_axes:
        raise RecipeError(f"{type(task).__name__} generates on one device; remove the mesh")
    if shape.stage != 1:
        raise LayoutError(f"mesh.stage={shape.stage}: generation has no pipeline; split rows by mesh.fsdp instead")
    axes = task.parameter_axes(params)
    arrays = tuple((name, leaf_axes, leaf.shape) for name, leaf, leaf_axes in pair_axes(params, axes))
    needs = MeshRequirements(arrays=arrays, who=type(task).__name__)
    placement = Placement.create(shape, needs=needs)
    check(needs, placement.rules, placement.sizes)
    rules = fit_rules(placement.rules, needs, placement.sizes)
    placement = dataclasses.replace(placement, rules=rules).for_generation()
    replicated = placement.sharding()
    return ModelPlaces(placement.storage_shardings(params, axes), jax.tree.map(lambda _: replicated, state), placement)


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """Return shapes and dtypes with the sharding of each array."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), abstract, shardings
    )
