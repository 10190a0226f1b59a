"""Collectives over mesh axes by name; over an empty tuple of axes each one is the identity.

They require every mesh axis to be manual (see `docs/parallelism/index.md`): arrays are a device's local shards.
None of them is ever differentiated: the caller is a `jax.custom_vjp`, and its backward pass states the
transposed collective.

Shapes, for n devices along `axes`:

    all_gather      [..., dim, ...]      -> [..., n * dim, ...]
    reduce_scatter  [..., n * dim, ...]  -> [..., dim, ...]
    all_reduce      [...]                -> [...]
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import RecipeError
from ..core.layout.declarations import tag_comm
from ..core.layout.layout import MeshAxes, current_layout
from ..core.measures import MeanWithInterval, is_measure, merged_fields, merges_by_max
from ..core.params.logical import Role, axis_for_role


def all_gather(x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
    """Gather the shards of `x` along `axes`, concatenated along `dim`."""
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def reduce_scatter(x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
    """Sum `x` over `axes` and return this device's shard of the sum along `dim`."""
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def all_reduce(x: Any, axes: MeshAxes) -> Any:
    """Sum every array of a tree over `axes`."""
    return jax.lax.psum(x, axes) if axes else x


def gather_dims(x: jax.Array, dims: Sequence[MeshAxes]) -> jax.Array:
    """Gather each dimension over its axes: a weight, from its storage layout to its compute layout."""
    with tag_comm("weights"):
        for dim, axes in enumerate(dims):
            x = all_gather(x, axes, dim)
    return x


def scatter_dims(x: jax.Array, dims: Sequence[MeshAxes]) -> jax.Array:
    """Reduce-scatter each dimension over its axes: a weight's gradient, from its compute layout to its
    storage layout.
    """
    with tag_comm("gradients"):
        for dim, axes in enumerate(dims):
            x = reduce_scatter(x, axes, dim)
    return x


def axis_index(axes: MeshAxes) -> jax.Array:
    """Return this device's index along `axes`, with the first axis varying slowest; 0 if `axes` is empty."""
    return jax.lax.axis_index(axes) if axes else jnp.int32(0)


def token_axes() -> MeshAxes:
    """Return the mesh axes that shard the tokens of a batch."""
    layout, both = current_layout(), (axis_for_role(Role.ROWS), axis_for_role(Role.POSITIONS))
    return () if layout is None else tuple(axis for dim in layout.compute(both) for axis in dim)


def psum_over_tokens(tree: Any) -> Any:
    """Sum a tree over the devices that hold different tokens of the (micro-)batch."""
    return all_reduce(tree, token_axes())


def merge_over_devices(measures: Any, axes: MeshAxes) -> Any:
    """Merge losses and metrics over `axes`, each by its own reduction.

    Raises:
        RecipeError: A measure is a `MeanWithInterval`, which needs whole arrays.
    """

    def merge(measure: Any) -> Any:
        if isinstance(measure, MeanWithInterval):
            raise RecipeError("MeanWithInterval needs whole arrays; a task that names its axes must return a Mean")

        def reduced(value: Any) -> jax.Array:
            return jax.lax.pmax(value, axes) if merges_by_max(measure) else all_reduce(value, axes)

        changes = {name: reduced(getattr(measure, name)) for name in merged_fields(measure)}
        return dataclasses.replace(measure, **changes)

    return jax.tree.map(merge, measures, is_leaf=is_measure) if axes else measures
