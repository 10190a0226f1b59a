"""Matmuls and other products. Half precisions accumulate in float32, as in PyTorch."""

from typing import Any

import jax
import jax.numpy as jnp

from ....kernels.product import product as product_of_matrices
from .registry import OutputSpec, aten, register_lowering


def matmul(a: Any, b: Any, turned: tuple[bool, bool] = (False, False)) -> Any:
    """Compute `a @ b` over the last dimension of `a` and the last but one of `b`, batched over equal leading
    dimensions.

    Args:
        turned: True for each of the two matrices that is a transpose. It is transposed again, which the compiler
            cancels, so that it can be multiplied in its memory order.
    """
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return jnp.matmul(a, b)
    if a.ndim == b.ndim == 2:
        equation = f"{'ba' if turned[0] else 'ab'},{'cb' if turned[1] else 'bc'}->ac"
        return product_of_matrices(equation, a.T if turned[0] else a, b.T if turned[1] else b, jnp.float32)
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


@register_lowering(aten.mm, aten.bmm, aten.mv, aten.matmul, aten.dot)
def _mm(out: OutputSpec, a: Any, b: Any) -> Any:
    return matmul(
        a.astype(out.dtype), b.astype(out.dtype), (0 in out.transposed_operands, 1 in out.transposed_operands)
    )


@register_lowering(aten.vdot)
def _vdot(out: OutputSpec, a: Any, b: Any) -> Any:
    return jnp.vdot(a, b)


@register_lowering(aten.addmm, aten.baddbmm, aten.addmv, aten.addbmm)
def _addmm(out: OutputSpec, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    found = matmul(
        a.astype(out.dtype), b.astype(out.dtype), (1 in out.transposed_operands, 2 in out.transposed_operands)
    )
    if found.ndim > len(out.shape):
        found = found.sum(0)
    if alpha != 1:
        found = found * alpha
    return found if beta == 0 else found + (x if beta == 1 else x * beta).astype(found.dtype)


@register_lowering(aten.addr)
def _addr(out: OutputSpec, x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return beta * x + alpha * jnp.outer(a, b)


@register_lowering(aten._cdist_forward)
def _distance(out: OutputSpec, a: Any, b: Any, p: Any = 2.0, compute_mode: Any = None) -> Any:
    apart = jnp.abs(a[..., :, None, :] - b[..., None, :, :])
    return jnp.sqrt((apart * apart).sum(-1)) if p == 2.0 else (apart**p).sum(-1) ** (1 / p)


@register_lowering(aten._cdist_backward)
def _distance_backward(out: OutputSpec, gradient: Any, a: Any, b: Any, p: Any, distance: Any) -> Any:
    """Compute the gradient with respect to the first points; zero if two points are equal."""
    apart = a[..., :, None, :] - b[..., None, :, :]
    safe = jnp.where(distance == 0, 1, distance)[..., None]
    slope = jnp.sign(apart) * (jnp.abs(apart) / safe) ** (p - 1)
    return (jnp.where(distance == 0, 0, gradient)[..., None] * slope).sum(-2).reshape(out.shape)


@register_lowering(aten._trilinear)
def _trilinear(
    out: OutputSpec, a: Any, b: Any, c: Any, one: Any, two: Any, three: Any, summed: Any, unroll: int = 1
) -> Any:
    a, b, c = (jnp.expand_dims(x, tuple(dims)) for x, dims in ((a, one), (b, two), (c, three)))
    return (a * b * c).sum(tuple(summed)).reshape(out.shape)


@register_lowering(aten._fft_r2c)
def _fft_r2c(out: OutputSpec, x: Any, dims: Any, normalization: int, onesided: bool) -> Any:
    function = jnp.fft.rfftn if onesided else jnp.fft.fftn
    return function(x, axes=tuple(dims)) * _scale(x, dims, normalization)


@register_lowering(aten._fft_c2c)
def _fft_c2c(out: OutputSpec, x: Any, dims: Any, normalization: int, forward: bool) -> Any:
    if forward:
        return jnp.fft.fftn(x, axes=tuple(dims)) * _scale(x, dims, normalization)
    count = _count(x.shape, dims)
    return jnp.fft.ifftn(x, axes=tuple(dims)) * count * _scale(x, dims, normalization)


@register_lowering(aten._fft_c2r)
def _fft_c2r(out: OutputSpec, x: Any, dims: Any, normalization: int, last: int) -> Any:
    sizes = [*(x.shape[d] for d in dims[:-1]), last]
    whole = jnp.fft.irfftn(x, s=sizes, axes=tuple(dims))
    count = 1
    for size in sizes:
        count *= size
    return whole * count * {0: 1.0, 1: count**-0.5, 2: 1 / count}[normalization]


def _count(shape: Any, dims: Any) -> int:
    count = 1
    for d in dims:
        count *= shape[d]
    return count


def _scale(x: Any, dims: Any, normalization: int) -> float:
    """Return the normalization factor. 0: none, 1: by the root of the number of points, 2: by their number."""
    return {0: 1.0, 1: _count(x.shape, dims) ** -0.5, 2: 1 / _count(x.shape, dims)}[normalization]


@register_lowering(aten._linalg_check_errors)
def _check_errors(out: None, info: Any, name: str, *, is_matrix: bool) -> None:
    """Ignore `info`: a failed factorization yields NaN in JAX, which its guard detects (`guards.py`)."""


@register_lowering(aten.linalg_inv_ex.default)
def _inverse(out: Any, x: Any, check_errors: bool = False) -> Any:
    return jnp.linalg.inv(x), jnp.zeros(out[1].shape, jnp.int32)


@register_lowering(aten.linalg_cholesky_ex.default)
def _cholesky(out: Any, x: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    lower = jnp.linalg.cholesky(x)
    return (lower.swapaxes(-1, -2) if upper else lower), jnp.zeros(out[1].shape, jnp.int32)


@register_lowering(aten.linalg_solve_triangular.default)
def _solve_triangular(
    out: OutputSpec, a: Any, b: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    return jax.lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)
