"""Grouped matmuls by definition: every matrix times every row, masked. Ground truth for tests; slow."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from panax.kernels.grouped.rows import Groups
from panax.kernels.precision import accumulation_dtype


def reference_product(
    x: Float[Array, "row k"], w: Float[Array, "group _ _"], groups: Groups, *, transposed: bool, out_dtype: DTypeLike
) -> Float[Array, "row n"]:
    """Compute `grouped_product`; the rows of unused tiles are zeros."""
    x, w = (a.astype(accumulation_dtype(x.dtype)) for a in (x, w))

    def add(total, group):
        row_mask, matrix = group
        product = jnp.dot(x, matrix.T if transposed else matrix, precision=lax.Precision.HIGHEST)
        return total + jnp.where(row_mask[:, None], product, 0), None

    start = jnp.zeros((groups.rows, w.shape[1 if transposed else 2]), x.dtype)
    return lax.scan(add, start, (_own_rows(groups), w))[0].astype(out_dtype)


def reference_outer(
    x: Float[Array, "row k"], y: Float[Array, "row n"], groups: Groups, *, out_dtype: DTypeLike
) -> Float[Array, "group k n"]:
    """Compute `grouped_outer`."""
    x, y = (a.astype(accumulation_dtype(x.dtype)) for a in (x, y))

    def outer(row_mask: Array) -> Array:
        left, right = (jnp.where(row_mask[:, None], a, 0) for a in (x, y))
        return jnp.dot(left.T, right, precision=lax.Precision.HIGHEST)

    return jax.lax.map(outer, _own_rows(groups)).astype(out_dtype)


def _own_rows(groups: Groups) -> Bool[Array, "group row"]:
    row, starts = jnp.arange(groups.rows)[None, :], groups.starts[:, None]
    return (row >= starts) & (row < starts + groups.sizes.astype(starts.dtype)[:, None])
