"""Views, slices, concatenations: operations that move elements without changing their values."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .registry import OutputSpec, aten, register_lowering


@register_lowering(
    aten.view.default, aten.view_copy.default, aten.reshape, aten._unsafe_view, aten._reshape_alias, aten._reshape_copy
)
@register_lowering(aten.squeeze, aten.squeeze_copy, aten.unsqueeze, aten.unsqueeze_copy, aten.flatten, aten.unflatten)
def _reshape(out: OutputSpec, x: Any, *args: Any, **kwargs: Any) -> Any:
    return jnp.reshape(x, out.shape)


@register_lowering(aten.permute, aten.permute_copy)
def _permute(out: OutputSpec, x: Any, dims: Any) -> Any:
    return jnp.transpose(x, dims)


@register_lowering(aten.t, aten.t_copy)
def _t(out: OutputSpec, x: Any) -> Any:
    return x.T


@register_lowering(aten.transpose, aten.transpose_copy)
def _transpose(out: OutputSpec, x: Any, a: int, b: int) -> Any:
    return jnp.swapaxes(x, a, b) if x.ndim else x


@register_lowering(aten.expand, aten.expand_copy, aten.broadcast_to)
def _expand(out: OutputSpec, x: Any, *args: Any, **kwargs: Any) -> Any:
    return jnp.broadcast_to(x, out.shape)


def _bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    return slice(start, end).indices(size)[:2]


@register_lowering(aten.slice, aten.slice_copy)
def _slice(out: OutputSpec, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    low, high = _bounds(x.shape[dim], start, end)
    return jax.lax.slice_in_dim(x, low, max(low, high), step, axis=dim % x.ndim)


def _part(x: Any, dim: int, start: Any, end: Any, step: int) -> tuple[Any, ...]:
    low, high = _bounds(x.shape[dim], start, end)
    return (slice(None),) * (dim % x.ndim) + (slice(low, high, step),)


@register_lowering(aten.slice_scatter)
def _slice_scatter(
    out: OutputSpec, x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    return x.at[_part(x, dim, start, end, step)].set(source.astype(x.dtype))


@register_lowering(aten.slice_backward)
def _slice_backward(out: OutputSpec, gradient: Any, sizes: Any, dim: int, start: int, end: int, step: int) -> Any:
    return _slice_scatter(out, jnp.zeros(sizes, gradient.dtype), gradient, dim, start, end, step)


@register_lowering(aten.select, aten.select_copy)
def _select(out: OutputSpec, x: Any, dim: int, index: int) -> Any:
    return jax.lax.index_in_dim(x, index, axis=dim % x.ndim, keepdims=False)


@register_lowering(aten.select_scatter)
def _select_scatter(out: OutputSpec, x: Any, source: Any, dim: int, index: int) -> Any:
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(source.astype(x.dtype))


@register_lowering(aten.select_backward)
def _select_backward(out: OutputSpec, gradient: Any, sizes: Any, dim: int, index: int) -> Any:
    return _select_scatter(out, jnp.zeros(sizes, gradient.dtype), gradient, dim, index)


@register_lowering(aten.cat, aten.concat)
def _cat(out: OutputSpec, tensors: Any, dim: int = 0) -> Any:
    # An empty tensor of one dimension can be concatenated with anything.
    parts = [part.astype(out.dtype) for part in tensors if part.shape != (0,)]
    return jnp.concatenate(parts, axis=dim) if parts else jnp.zeros(out.shape, out.dtype)


@register_lowering(aten.stack)
def _stack(out: OutputSpec, tensors: Any, dim: int = 0) -> Any:
    return jnp.stack([part.astype(out.dtype) for part in tensors], axis=dim)


@register_lowering(aten.split_with_sizes, aten.split_with_sizes_copy, aten.split.sizes)
def _split_with_sizes(out: Any, x: Any, sizes: Any, dim: int = 0) -> Any:
    return tuple(jnp.split(x, np.cumsum(sizes)[:-1].tolist(), axis=dim))


@register_lowering(aten.split.Tensor, aten.split_copy.Tensor)
def _split(out: Any, x: Any, size: int, dim: int = 0) -> Any:
    return tuple(jnp.split(x, list(range(size, x.shape[dim], size)), axis=dim))


@register_lowering(aten.unbind, aten.unbind_copy)
def _unbind(out: Any, x: Any, dim: int = 0) -> Any:
    return tuple(jax.lax.index_in_dim(x, i, axis=dim % x.ndim, keepdims=False) for i in range(x.shape[dim]))


@register_lowering(aten.repeat)
def _repeat(out: OutputSpec, x: Any, repeats: Any) -> Any:
    return jnp.tile(x, repeats)


@register_lowering(aten.repeat_interleave.self_int)
def _repeat_interleave(out: OutputSpec, x: Any, repeats: int, dim: int | None = None, **kwargs: Any) -> Any:
    return jnp.repeat(x, repeats, axis=dim)


@register_lowering(aten.flip)
def _flip(out: OutputSpec, x: Any, dims: Any) -> Any:
    return jnp.flip(x, axis=tuple(dims))


@register_lowering(aten.roll)
def _roll(out: OutputSpec, x: Any, shifts: Any, dims: Any = ()) -> Any:
    if not dims:
        return jnp.roll(x.reshape(-1), tuple(shifts)).reshape(x.shape)
    return jnp.roll(x, tuple(shifts), axis=tuple(dims))


@register_lowering(aten.constant_pad_nd)
def _constant_pad(out: OutputSpec, x: Any, pad: Any, value: Any = 0) -> Any:
    widths = [(0, 0, 0)] * (x.ndim - len(pad) // 2)
    widths += [(pad[i], pad[i + 1], 0) for i in range(len(pad) - 2, -1, -2)]
    return jax.lax.pad(x, jnp.asarray(value).astype(x.dtype), widths)


def _padded_by(mode: str) -> Any:
    def apply(out: OutputSpec, x: Any, pad: Any) -> Any:
        widths = [(0, 0)] * (x.ndim - len(pad) // 2) + [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
        return jnp.pad(x, widths, mode=mode)

    return apply


def _padded_back(mode: str) -> Any:
    def apply(out: OutputSpec, gradient: Any, x: Any, pad: Any) -> Any:
        forward = lambda x: _padded_by(mode)(out, x, pad)  # noqa: E731
        return jax.vjp(forward, x)[1](gradient.astype(x.dtype))[0]

    return apply


for _mode, _names in {"reflect": "reflection_pad", "edge": "replication_pad"}.items():
    for _n in (1, 2, 3):
        register_lowering(getattr(aten, f"{_names}{_n}d"))(_padded_by(_mode))
        register_lowering(getattr(aten, f"{_names}{_n}d_backward"))(_padded_back(_mode))


def _strided_indices(shape: Any, size: Any, stride: Any, offset: Any) -> np.ndarray:
    """Return the index of each element of a strided view in the contiguous tensor underneath."""
    places = np.full(tuple(size), offset or 0, np.int64)
    for dim, (n, step) in enumerate(zip(size, stride)):
        places += (np.arange(n) * step).reshape((-1,) + (1,) * (len(size) - dim - 1))
    return places


@register_lowering(aten.as_strided, aten.as_strided_copy)
def _as_strided(out: OutputSpec, x: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    return x.reshape(-1)[_strided_indices(x.shape, size, stride, offset)]


@register_lowering(aten.as_strided_scatter)
def _as_strided_scatter(out: OutputSpec, x: Any, source: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    return (
        x.reshape(-1).at[_strided_indices(x.shape, size, stride, offset)].set(source.astype(x.dtype)).reshape(x.shape)
    )


@register_lowering(aten.diagonal, aten.diagonal_copy)
def _diagonal(out: OutputSpec, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return jnp.diagonal(x, offset, dim1, dim2)


def _diagonal_places(x: Any, offset: int, dim1: int, dim2: int) -> np.ndarray:
    return np.diagonal(np.arange(x.size).reshape(x.shape), offset, dim1, dim2)


@register_lowering(aten.diagonal_scatter)
def _diagonal_scatter(out: OutputSpec, x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    places = _diagonal_places(x, offset, dim1, dim2)
    return x.reshape(-1).at[places].set(source.astype(x.dtype)).reshape(x.shape)


@register_lowering(aten.diagonal_backward)
def _diagonal_backward(out: OutputSpec, gradient: Any, sizes: Any, offset: int, dim1: int, dim2: int) -> Any:
    return _diagonal_scatter(out, jnp.zeros(sizes, gradient.dtype), gradient, offset, dim1, dim2)


@register_lowering(aten.tril)
def _tril(out: OutputSpec, x: Any, diagonal: int = 0) -> Any:
    return jnp.tril(x, diagonal)


@register_lowering(aten.triu)
def _triu(out: OutputSpec, x: Any, diagonal: int = 0) -> Any:
    return jnp.triu(x, diagonal)


@register_lowering(aten.tril_indices)
def _tril_indices(out: OutputSpec, row: int, col: int, offset: int = 0, **kwargs: Any) -> Any:
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)))


@register_lowering(aten.triu_indices)
def _triu_indices(out: OutputSpec, row: int, col: int, offset: int = 0, **kwargs: Any) -> Any:
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col)))


@register_lowering(aten.eye)
def _eye(out: OutputSpec, *args: Any, **kwargs: Any) -> Any:
    return jnp.eye(*out.shape, dtype=out.dtype)


@register_lowering(aten.unfold, aten.unfold_copy)
def _unfold(out: OutputSpec, x: Any, dim: int, size: int, step: int) -> Any:
    count = (x.shape[dim] - size) // step + 1
    places = np.arange(count)[:, None] * step + np.arange(size)
    return jnp.moveaxis(jnp.take(x, places, axis=dim), dim % x.ndim + 1, -1)


@register_lowering(aten.unfold_backward)
def _unfold_backward(out: OutputSpec, gradient: Any, sizes: Any, dim: int, size: int, step: int) -> Any:
    zero = jnp.zeros(sizes, gradient.dtype)
    return jax.vjp(lambda x: _unfold(out, x, dim, size, step), zero)[1](gradient)[0]


@register_lowering(aten.pixel_shuffle)
def _pixel_shuffle(out: OutputSpec, x: Any, factor: int) -> Any:
    *lead, channels, height, width = x.shape
    x = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    n = len(lead)
    return jnp.transpose(x, (*range(n), n, n + 3, n + 1, n + 4, n + 2)).reshape(out.shape)
