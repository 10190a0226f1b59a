"""Differentiable collectives, each paired with its transpose in the backward pass.

Along a mesh axis a value is split (each device holds a part), whole (all devices hold the same value) or
partial (each device holds a partial sum). Its cotangent is described in the same words: the cotangent of a
whole array that devices read independently is partial, so the transpose of a gather is a reduce-scatter.

    function             forward                       backward
    all_gather_sum       split -> whole (all-gather)   partial -> split (reduce-scatter)
    reduce_scatter_sum   partial -> split              split -> whole (all-gather)
    psum_both            partial -> whole              partial -> whole
    psum_forward         partial -> whole              identity
    shift_right          device i - 1 -> device i      device i + 1 -> device i
"""

import functools

import jax
import jax.numpy as jnp

from ..core.layout.layout import MeshAxes
from .collectives import all_gather, all_reduce, reduce_scatter
from .sharding_marks import ValueState, assert_sharding


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather_sum(x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
    """Gather an array that is split along `dim`; partial cotangents are reduce-scattered."""
    return all_gather(x, axes, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def reduce_scatter_sum(x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
    """Reduce-scatter partial sums along `dim`; cotangents are gathered."""
    return reduce_scatter(x, axes, dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def psum_both(x: jax.Array, axes: MeshAxes) -> jax.Array:
    """Sum partial values over devices; cotangents, partial on each device, are summed too."""
    return all_reduce(x, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def psum_forward(x: jax.Array, axes: MeshAxes) -> jax.Array:
    """Sum partial values over devices; the cotangent, already equal on all devices, is passed through."""
    return all_reduce(x, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def shift_right(x: jax.Array, axis: str) -> jax.Array:
    """Return the value of the previous device along a mesh axis, zeros on the first device; cotangents shift
    back.

    Used for the edge between contiguous parts of a sequence.
    """
    return _handed(x, axis, 1)


def _handed(x: jax.Array, axis: str, by: int) -> jax.Array:
    # Gathered, not permuted: on CPU a permutation waits for every device of the mesh, but not every pipeline
    # stage runs this if stages differ in their layers. Edges are small.
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
