"""Collectives over mesh axes, by the axes' names; each does nothing over no axis.

They are called while every mesh axis is manual (see `docs/parallelism.md`): arrays are a device's own shards. None of them is
ever differentiated: whoever calls one stands inside a `jax.custom_vjp` whose backward pass says which collective answers it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.errors import RecipeError
from ..core.expected import tag_comm
from ..core.layout import MeshAxes, current_layout
from ..core.logical import Role, axis_of
from ..core.measures import MeanWithInterval, counted_fields, is_measure, keeps_largest


def all_gather(x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
    """The shards of `x` along `axes`, put together along `dim`."""
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def reduce_scatter(x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
    """The sum of `x` over `axes`, of which each device keeps its part along `dim`."""
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def all_reduce(x: Any, axes: MeshAxes) -> Any:
    """The sums of a tree of arrays over `axes`."""
    return jax.lax.psum(x, axes) if axes else x


def gather_dims(x: jax.Array, dims: Sequence[MeshAxes]) -> jax.Array:
    """`all_gather` along each dimension over its own axes: a weight on its way to where it is used."""
    with tag_comm("weights"):
        for dim, axes in enumerate(dims):
            x = all_gather(x, axes, dim)
    return x


def scatter_dims(x: jax.Array, dims: Sequence[MeshAxes]) -> jax.Array:
    """`reduce_scatter` along each dimension over its own axes: a weight's gradient on its way to where it rests."""
    with tag_comm("gradients"):
        for dim, axes in enumerate(dims):
            x = reduce_scatter(x, axes, dim)
    return x


def axis_index(axes: MeshAxes) -> jax.Array:
    """This device's place along `axes`, the first one slowest; 0 along none."""
    return jax.lax.axis_index(axes) if axes else jnp.int32(0)


def token_axes() -> MeshAxes:
    """The mesh axes that a batch's tokens are split over."""
    layout, both = current_layout(), (axis_of(Role.ROWS), axis_of(Role.POSITIONS))
    return () if layout is None else tuple(axis for dim in layout.compute(both) for axis in dim)


def psum_over_tokens(tree: Any) -> Any:
    """Sums over this device's tokens, added up over all tokens of the (micro-)batch."""
    return all_reduce(tree, token_axes())


def merge_over_devices(measures: Any, axes: MeshAxes) -> Any:
    """Losses and metrics merged over `axes`, each by its own reduction."""

    def merge(measure: Any) -> Any:
        if isinstance(measure, MeanWithInterval):
            raise RecipeError(
                "a MeanWithInterval is of tasks that see whole arrays; one that names its axes returns a Mean"
            )

        def reduced(value: Any) -> jax.Array:
            return jax.lax.pmax(value, axes) if keeps_largest(measure) else all_reduce(value, axes)

        changes = {name: reduced(getattr(measure, name)) for name in counted_fields(measure)}
        return dataclasses.replace(measure, **changes)

    return jax.tree.map(merge, measures, is_leaf=is_measure) if axes else measures
