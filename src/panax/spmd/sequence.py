"""Sequence parallelism: the residual stream sharded along positions, over the mesh axes that shard heads and
widths.

Between attention and feed-forward layers the positions of the residual stream are sharded over these axes as
well (axis `residual`); a matmul with a sharded result reads them gathered (axis `seq`). If a task keeps the
residual stream whole (`Task.splits_residual` is false), its values are computed alike on all devices of such
an axis, and its cotangents are partial.
"""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ..core.layout.layout import MeshAxes, current_layout
from ..core.params.logical import Role, axis_for_role
from .collectives import token_axes
from .linear import all_gather_sum, psum_forward, reduce_scatter_sum
from .sharding_marks import mark_shared_cotangent

GATHERED_SEQUENCE = "whole_sequence"
"""Name of activations gathered along the sequence, in rematerialization policies."""


def all_gather_sequence(x: Float[Array, "batch residual ..."]) -> Float[Array, "batch seq ..."]:
    """Gather the residual stream along the sequence over the tensor axis, for a matmul with a sharded result.

    The cotangents are partial sums and are reduce-scattered.
    """
    axes = sequence_parallel_axes()
    return checkpoint_name(all_gather_sum(x, axes, 1), GATHERED_SEQUENCE) if axes else x


def reduce_scatter_sequence(x: Float[Array, "batch seq embed"]) -> Float[Array, "batch residual embed"]:
    """Reduce-scatter partial sums over the tensor axis into the layout of the residual stream; cotangents are
    gathered.
    """
    axes = sequence_parallel_axes()
    return reduce_scatter_sum(x, axes, 1) if axes else x


def sum_over_sequence(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Sum the values that devices computed for their positions of the residual stream; equal on all devices.

    The cotangent is passed through to each device's term.
    """
    axes = sequence_parallel_axes()
    return psum_forward(x, axes) if axes else x


def split_cotangent(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x`, computed alike on all devices of the axes that shard no tokens, and divide its cotangent
    among them.

    Use it on a loss that every one of these devices computes and that has gradients summed over them.

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
    """Return this device's positions of the residual stream, for an array with second axis `seq`; not
    differentiated.
    """
    axes = sequence_parallel_axes()
    if not axes:
        return x
    part = x.shape[1] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * part, part, axis=1)


def sequence_parallel_axes() -> MeshAxes:
    """Return the mesh axes that shard the positions of the residual stream in addition to those of `seq`."""
    layout = current_layout()
    if layout is None:
        return ()
    (stream,), (row,) = (layout.compute((axis_for_role(role),)) for role in (Role.STREAM, Role.POSITIONS))
    return tuple(axis for axis in stream if axis not in row)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _equal_shares(axes: MeshAxes, x: jax.Array) -> jax.Array:
    return x


_equal_shares.defvjp(
    lambda axes, x: (x, None),
    lambda axes, _, gradient: (mark_shared_cotangent(gradient / jax.lax.axis_size(axes), axes),),
)
