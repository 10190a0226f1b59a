"""Collectives that are differentiated: each with the one that answers it in the backward pass.

What a device holds of an array is a part of it (split), all of it (whole), or a term of a sum over devices (partial). A cotangent
is the same of the gradient: that of a whole array which devices read alike is partial, and so is summed where it was gathered.
"""

import functools

import jax
import jax.numpy as jnp

from ..core.layout import MeshAxes
from .collectives import all_gather, all_reduce, reduce_scatter
from .marks import ValueState, assert_sharding


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather_sum(x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
    """Split along `dim` to whole; partial cotangents are reduce-scattered."""
    return all_gather(x, axes, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def reduce_scatter_sum(x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
    """Partial to split along `dim`; cotangents are gathered."""
    return reduce_scatter(x, axes, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def psum_both(x: jax.Array, axes: MeshAxes) -> jax.Array:
    """Partial to whole; the cotangent, of which each device has a share, is summed too."""
    return all_reduce(x, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def psum_forward(x: jax.Array, axes: MeshAxes) -> jax.Array:
    """Partial to whole; the cotangent is the same on all devices already, and is each one's own."""
    return all_reduce(x, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def shift_right(x: jax.Array, axis: str) -> jax.Array:
    """What the device before holds along a mesh axis, zeros on the first one; cotangents go back. An edge of contiguous parts."""
    return _handed(x, axis, 1)


def _handed(x: jax.Array, axis: str, by: int) -> jax.Array:
    # Gathered, not permuted: on CPU a permutation waits for every device of the mesh, and where the stages of a pipeline differ
    # in their layers, not all run this. Edges are small.
    source, size = jax.lax.axis_index(axis) - by, jax.lax.axis_size(axis)
    edges = all_gather(x[None], (axis,), 0)
    edge = jax.lax.dynamic_index_in_dim(edges, jnp.clip(source, 0, size - 1), keepdims=False)
    return assert_sharding(
        jnp.where((source >= 0) & (source < size), edge, jnp.zeros_like(edge)), {axis: ValueState.OWN}
    )


all_gather_sum.defvjp(
    lambda x, axes, dim: (all_gather(x, axes, dim), None),
    lambda axes, dim, _, gradient: (reduce_scatter(gradient, axes, dim),),
)
reduce_scatter_sum.defvjp(
    lambda x, axes, dim: (reduce_scatter(x, axes, dim), None),
    lambda axes, dim, _, gradient: (all_gather(gradient, axes, dim),),
)
psum_both.defvjp(
    lambda x, axes: (all_reduce(x, axes), None),
    lambda axes, _, gradient: (all_reduce(gradient, axes),),
)
shift_right.defvjp(
    lambda x, axis: (_handed(x, axis, 1), None),
    lambda axis, _, gradient: (_handed(gradient, axis, -1),),
)
psum_forward.defvjp(lambda x, axes: (all_reduce(x, axes), None), lambda axes, _, gradient: (gradient,))
