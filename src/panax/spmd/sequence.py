"""The residual stream along the sequence, over the mesh axes that split heads and widths.

Between attention and feed-forward layers the residual stream's positions are split over those axes too (`residual`); what a
product that splits its result reads is whole along them (`seq`). Where a task leaves the stream whole
(`Task.splits_residual`), what lies in it is computed alike on all devices of such an axis, and each has a share of its cotangent.
"""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ..core.layout import MeshAxes, current_layout
from ..core.logical import Role, axis_of
from .collectives import token_axes
from .linear import all_gather_sum, psum_forward, reduce_scatter_sum
from .marks import mark_shared_cotangent

SPREAD = "whole_sequence"
"""The name under which a rematerialisation policy knows an activation that was gathered along the sequence."""


def all_gather_sequence(x: Float[Array, "batch residual ..."]) -> Float[Array, "batch seq ..."]:
    """The residual stream, gathered along the sequence over the tensor axis: what a product that splits its result reads.

    Its cotangents there are partial sums: they are reduce-scattered back.
    """
    axes = sequence_parallel_axes()
    return checkpoint_name(all_gather_sum(x, axes, 1), SPREAD) if axes else x


def reduce_scatter_sequence(x: Float[Array, "batch seq embed"]) -> Float[Array, "batch residual embed"]:
    """Partial sums over the tensor axis, added up into the residual stream's layout; the cotangent is gathered."""
    axes = sequence_parallel_axes()
    return reduce_scatter_sum(x, axes, 1) if axes else x


def sum_over_sequence(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The sum of what each device found for its part of the residual stream's positions; equal on all of them.

    Its cotangent is each part's own.
    """
    axes = sequence_parallel_axes()
    return psum_forward(x, axes) if axes else x


def split_cotangent(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """`x`, computed alike on all devices of the axes that split no tokens; each is given an equal share of its cotangent.

    Stands where a loss is computed on each of these devices, and its gradients are summed over them.

    >>> float(split_cotangent(jax.numpy.float32(2.0)))
    2.0
    """
    layout = current_layout()
    if layout is None:
        return x
    tokens = token_axes()
    axes = tuple(axis for axis, size in layout.sizes.items() if axis not in tokens and size > 1)
    return _equal_shares(axes, x) if axes else x


def local_sequence(x: Any) -> Any:
    """This device's part of the residual stream's positions, of an array whose second axis is `seq`; not differentiated."""
    axes = sequence_parallel_axes()
    if not axes:
        return x
    part = x.shape[1] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * part, part, axis=1)


def sequence_parallel_axes() -> MeshAxes:
    """The mesh axes that split the residual stream's positions further than `seq` is split."""
    layout = current_layout()
    if layout is None:
        return ()
    (stream,), (row,) = (layout.compute((axis_of(role),)) for role in (Role.STREAM, Role.POSITIONS))
    return tuple(axis for axis in stream if axis not in row)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _equal_shares(axes: MeshAxes, x: jax.Array) -> jax.Array:
    return x


_equal_shares.defvjp(
    lambda axes, x: (x, None),
    lambda axes, _, gradient: (mark_shared_cotangent(gradient / jax.lax.axis_size(axes), axes),),
)
