"""Operations over dimensions: sums, extremes, sorting, softmax."""

from typing import Any

import jax
import jax.numpy as jnp

from ....kernels.product import sum_rows
from .registry import OutputSpec, aten, register_lowering, upcast


def _axes(x: Any, dim: Any) -> tuple[int, ...] | None:
    if dim is None or (isinstance(dim, tuple | list) and not dim):
        return None
    dims = dim if isinstance(dim, tuple | list) else (dim,)
    return tuple(d % max(x.ndim, 1) for d in dims) if x.ndim else None


def _wide(out: OutputSpec, x: Any) -> Any:
    """Convert to the dtype in which PyTorch accumulates: half precisions in float32, booleans and small
    integers as integers."""
    if x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(out.dtype)
    return upcast(x)


@register_lowering(aten.sum)
def _sum(out: OutputSpec, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if x.ndim == 2 and _axes(x, dim) == (0,) and x.dtype == out.dtype and out.dtype in (jnp.float32, jnp.bfloat16):
        return sum_rows(x).reshape(out.shape)  # The gradient of a bias.
    return jnp.sum(_wide(out, x), axis=_axes(x, dim), keepdims=keepdim)


@register_lowering(aten.mean)
def _mean(out: OutputSpec, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return jnp.mean(_wide(out, x), axis=_axes(x, dim), keepdims=keepdim)


@register_lowering(aten.prod)
def _prod(out: OutputSpec, x: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return jnp.prod(_wide(out, x), axis=_axes(x, dim), keepdims=keepdim)


@register_lowering(aten.amax)
def _amax(out: OutputSpec, x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return jnp.max(x, axis=_axes(x, dim), keepdims=keepdim)


@register_lowering(aten.amin)
def _amin(out: OutputSpec, x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return jnp.min(x, axis=_axes(x, dim), keepdims=keepdim)


@register_lowering(aten.max.default)
def _max(out: OutputSpec, x: Any) -> Any:
    return jnp.max(x)


@register_lowering(aten.min.default)
def _min(out: OutputSpec, x: Any) -> Any:
    return jnp.min(x)


@register_lowering(aten.max.dim)
def _max_dim(out: Any, x: Any, dim: int, keepdim: bool = False) -> Any:
    return jnp.max(x, axis=dim, keepdims=keepdim), jnp.argmax(x, axis=dim, keepdims=keepdim)


@register_lowering(aten.min.dim)
def _min_dim(out: Any, x: Any, dim: int, keepdim: bool = False) -> Any:
    return jnp.min(x, axis=dim, keepdims=keepdim), jnp.argmin(x, axis=dim, keepdims=keepdim)


@register_lowering(aten.argmax)
def _argmax(out: OutputSpec, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmax(x, axis=dim, keepdims=keepdim)


@register_lowering(aten.argmin)
def _argmin(out: OutputSpec, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmin(x, axis=dim, keepdims=keepdim)


@register_lowering(aten.any)
def _any(out: OutputSpec, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.any(x, axis=_axes(x, dim), keepdims=keepdim)


@register_lowering(aten.all)
def _all(out: OutputSpec, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.all(x, axis=_axes(x, dim), keepdims=keepdim)


@register_lowering(aten.var.correction)
def _var(out: OutputSpec, x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    return jnp.var(upcast(x), axis=_axes(x, dim), ddof=_correction(correction), keepdims=keepdim)


@register_lowering(aten.std.correction)
def _std(out: OutputSpec, x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    return jnp.std(upcast(x), axis=_axes(x, dim), ddof=_correction(correction), keepdims=keepdim)


@register_lowering(aten.var_mean.correction)
def _var_mean(out: Any, x: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    return _var(out[0], x, dim, correction=correction, keepdim=keepdim), jnp.mean(
        upcast(x), axis=_axes(x, dim), keepdims=keepdim
    )


def _correction(value: Any) -> Any:
    return 1 if value is None else value


@register_lowering(aten.cumsum)
def _cumsum(out: OutputSpec, x: Any, dim: int, *, dtype: Any = None) -> Any:
    return jnp.cumsum(_wide(out, x), axis=dim) if x.ndim else x


@register_lowering(aten.cumprod)
def _cumprod(out: OutputSpec, x: Any, dim: int, *, dtype: Any = None) -> Any:
    return jnp.cumprod(_wide(out, x), axis=dim)


@register_lowering(aten.cummax)
def _cummax(out: Any, x: Any, dim: int) -> Any:
    values = jax.lax.cummax(x, axis=dim % x.ndim)
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim % x.ndim)
    return values, jax.lax.cummax(jnp.where(x == values, places, 0), axis=dim % x.ndim)


@register_lowering(aten.logcumsumexp)
def _logcumsumexp(out: OutputSpec, x: Any, dim: int) -> Any:
    return jax.lax.cumlogsumexp(upcast(x), axis=dim % x.ndim)


@register_lowering(aten.logsumexp)
def _logsumexp(out: OutputSpec, x: Any, dim: Any, keepdim: bool = False) -> Any:
    return jax.nn.logsumexp(upcast(x), axis=_axes(x, dim), keepdims=keepdim)


@register_lowering(aten.topk)
def _topk(out: Any, x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    moved = jnp.moveaxis(x, dim, -1)
    values, places = jax.lax.top_k(moved if largest else -moved, k)
    return jnp.moveaxis(values if largest else -values, -1, dim), jnp.moveaxis(places, -1, dim)


@register_lowering(aten.sort)
def _sort(out: Any, x: Any, dim: int = -1, descending: bool = False, *, stable: Any = None) -> Any:
    places = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, places, axis=dim), places


@register_lowering(aten.sort.stable)
def _sort_stable(out: Any, x: Any, *, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
    return _sort(out, x, dim, descending)


@register_lowering(aten.linalg_vector_norm)
def _vector_norm(
    out: OutputSpec, x: Any, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    axes, size = _axes(x, dim), jnp.abs(_wide(out, x))
    if order in (float("inf"), float("-inf")):
        return (jnp.max if order > 0 else jnp.min)(size, axis=axes, keepdims=keepdim)
    if order == 0:
        return (size != 0).sum(axis=axes, keepdims=keepdim)
    if order == 2:
        return jnp.sqrt(jnp.square(size).sum(axis=axes, keepdims=keepdim))
    return (size**order).sum(axis=axes, keepdims=keepdim) ** (1 / order)


@register_lowering(aten._softmax)
def _softmax(out: OutputSpec, x: Any, dim: int, half_to_float: bool) -> Any:
    return jax.nn.softmax(upcast(x), axis=dim)


@register_lowering(aten._softmax_backward_data)
def _softmax_backward(out: OutputSpec, gradient: Any, y: Any, dim: int, dtype: Any) -> Any:
    product = upcast(gradient) * upcast(y)
    return product - upcast(y) * product.sum(dim, keepdims=True)


@register_lowering(aten._log_softmax)
def _log_softmax(out: OutputSpec, x: Any, dim: int, half_to_float: bool) -> Any:
    return jax.nn.log_softmax(upcast(x), axis=dim)


@register_lowering(aten._log_softmax_backward_data)
def _log_softmax_backward(out: OutputSpec, gradient: Any, y: Any, dim: int, dtype: Any) -> Any:
    g = upcast(gradient)
    return g - jnp.exp(upcast(y)) * g.sum(dim, keepdims=True)


@register_lowering(aten.histc, aten.bincount)
def _counts(out: OutputSpec, *args: Any, **kwargs: Any) -> Any:
    x = args[0]
    if (out.shape and len(args) > 2) or "max" in kwargs:
        bins = kwargs.get("bins", args[1] if len(args) > 1 else 100)
        low = kwargs.get("min", args[2] if len(args) > 2 else 0)
        high = kwargs.get("max", args[3] if len(args) > 3 else 0)
        return jnp.histogram(x, bins=bins, range=(low, high))[0]
    return jnp.zeros(out.shape, jnp.int32).at[x].add(1)
