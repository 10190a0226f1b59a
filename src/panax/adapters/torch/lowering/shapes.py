"""Views, copies of parts, joins: operations that move elements and change none."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .registry import Out, aten, lowers


@lowers(
    aten.view.default, aten.view_copy.default, aten.reshape, aten._unsafe_view, aten._reshape_alias, aten._reshape_copy
)
@lowers(aten.squeeze, aten.squeeze_copy, aten.unsqueeze, aten.unsqueeze_copy, aten.flatten, aten.unflatten)
def _reshape(out: Out, x: Any, *args: Any, **kwargs: Any) -> Any:
    return jnp.reshape(x, out.shape)


@lowers(aten.permute, aten.permute_copy)
def _permute(out: Out, x: Any, dims: Any) -> Any:
    return jnp.transpose(x, dims)


@lowers(aten.t, aten.t_copy)
def _t(out: Out, x: Any) -> Any:
    return x.T


@lowers(aten.transpose, aten.transpose_copy)
def _transpose(out: Out, x: Any, a: int, b: int) -> Any:
    return jnp.swapaxes(x, a, b) if x.ndim else x


@lowers(aten.expand, aten.expand_copy, aten.broadcast_to)
def _expand(out: Out, x: Any, *args: Any, **kwargs: Any) -> Any:
    return jnp.broadcast_to(x, out.shape)


def _bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    return slice(start, end).indices(size)[:2]


@lowers(aten.slice, aten.slice_copy)
def _slice(out: Out, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    low, high = _bounds(x.shape[dim], start, end)
    return jax.lax.slice_in_dim(x, low, max(low, high), step, axis=dim % x.ndim)


def _part(x: Any, dim: int, start: Any, end: Any, step: int) -> tuple[Any, ...]:
    low, high = _bounds(x.shape[dim], start, end)
    return (slice(None),) * (dim % x.ndim) + (slice(low, high, step),)


@lowers(aten.slice_scatter)
def _slice_scatter(
    out: Out, x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    return x.at[_part(x, dim, start, end, step)].set(source.astype(x.dtype))


@lowers(aten.slice_backward)
def _slice_backward(out: Out, gradient: Any, sizes: Any, dim: int, start: int, end: int, step: int) -> Any:
    return _slice_scatter(out, jnp.zeros(sizes, gradient.dtype), gradient, dim, start, end, step)


@lowers(aten.select, aten.select_copy)
def _select(out: Out, x: Any, dim: int, index: int) -> Any:
    return jax.lax.index_in_dim(x, index, axis=dim % x.ndim, keepdims=False)


@lowers(aten.select_scatter)
def _select_scatter(out: Out, x: Any, source: Any, dim: int, index: int) -> Any:
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)].set(source.astype(x.dtype))


@lowers(aten.select_backward)
def _select_backward(out: Out, gradient: Any, sizes: Any, dim: int, index: int) -> Any:
    return _select_scatter(out, jnp.zeros(sizes, gradient.dtype), gradient, dim, index)


@lowers(aten.cat, aten.concat)
def _cat(out: Out, tensors: Any, dim: int = 0) -> Any:
    # An empty tensor of one dimension joins with anything.
    parts = [part.astype(out.dtype) for part in tensors if part.shape != (0,)]
    return jnp.concatenate(parts, axis=dim) if parts else jnp.zeros(out.shape, out.dtype)


@lowers(aten.stack)
def _stack(out: Out, tensors: Any, dim: int = 0) -> Any:
    return jnp.stack([part.astype(out.dtype) for part in tensors], axis=dim)


@lowers(aten.split_with_sizes, aten.split_with_sizes_copy, aten.split.sizes)
def _split_with_sizes(out: Any, x: Any, sizes: Any, dim: int = 0) -> Any:
    return tuple(jnp.split(x, np.cumsum(sizes)[:-1].tolist(), axis=dim))


@lowers(aten.split.Tensor, aten.split_copy.Tensor)
def _split(out: Any, x: Any, size: int, dim: int = 0) -> Any:
    return tuple(jnp.split(x, list(range(size, x.shape[dim], size)), axis=dim))


@lowers(aten.unbind, aten.unbind_copy)
def _unbind(out: Any, x: Any, dim: int = 0) -> Any:
    return tuple(jax.lax.index_in_dim(x, i, axis=dim % x.ndim, keepdims=False) for i in range(x.shape[dim]))


@lowers(aten.repeat)
def _repeat(out: Out, x: Any, repeats: Any) -> Any:
    return jnp.tile(x, repeats)


@lowers(aten.repeat_interleave.self_int)
def _repeat_interleave(out: Out, x: Any, repeats: int, dim: int | None = None, **kwargs: Any) -> Any:
    return jnp.repeat(x, repeats, axis=dim)


@lowers(aten.flip)
def _flip(out: Out, x: Any, dims: Any) -> Any:
    return jnp.flip(x, axis=tuple(dims))


@lowers(aten.roll)
def _roll(out: Out, x: Any, shifts: Any, dims: Any = ()) -> Any:
    if not dims:
        return jnp.roll(x.reshape(-1), tuple(shifts)).reshape(x.shape)
    return jnp.roll(x, tuple(shifts), axis=tuple(dims))


@lowers(aten.constant_pad_nd)
def _constant_pad(out: Out, x: Any, pad: Any, value: Any = 0) -> Any:
    widths = [(0, 0, 0)] * (x.ndim - len(pad) // 2)
    widths += [(pad[i], pad[i + 1], 0) for i in range(len(pad) - 2, -1, -2)]
    return jax.lax.pad(x, jnp.asarray(value).astype(x.dtype), widths)


def _padded_by(mode: str) -> Any:
    def apply(out: Out, x: Any, pad: Any) -> Any:
        widths = [(0, 0)] * (x.ndim - len(pad) // 2) + [(pad[i], pad[i + 1]) for i in range(len(pad) - 2, -1, -2)]
        return jnp.pad(x, widths, mode=mode)

    return apply


def _padded_back(mode: str) -> Any:
    def apply(out: Out, gradient: Any, x: Any, pad: Any) -> Any:
        forward = lambda x: _padded_by(mode)(out, x, pad)  # noqa: E731
        return jax.vjp(forward, x)[1](gradient.astype(x.dtype))[0]

    return apply


for _mode, _names in {"reflect": "reflection_pad", "edge": "replication_pad"}.items():
    for _n in (1, 2, 3):
        lowers(getattr(aten, f"{_names}{_n}d"))(_padded_by(_mode))
        lowers(getattr(aten, f"{_names}{_n}d_backward"))(_padded_back(_mode))


def _places(shape: Any, size: Any, stride: Any, offset: Any) -> np.ndarray:
    """Where each element of a strided view lies in the contiguous tensor beneath it."""
    places = np.full(tuple(size), offset or 0, np.int64)
    for dim, (n, step) in enumerate(zip(size, stride)):
        places += (np.arange(n) * step).reshape((-1,) + (1,) * (len(size) - dim - 1))
    return places


@lowers(aten.as_strided, aten.as_strided_copy)
def _as_strided(out: Out, x: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    return x.reshape(-1)[_places(x.shape, size, stride, offset)]


@lowers(aten.as_strided_scatter)
def _as_strided_scatter(out: Out, x: Any, source: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    return x.reshape(-1).at[_places(x.shape, size, stride, offset)].set(source.astype(x.dtype)).reshape(x.shape)


@lowers(aten.diagonal, aten.diagonal_copy)
def _diagonal(out: Out, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return jnp.diagonal(x, offset, dim1, dim2)


def _diagonal_places(x: Any, offset: int, dim1: int, dim2: int) -> np.ndarray:
    return np.diagonal(np.arange(x.size).reshape(x.shape), offset, dim1, dim2)


@lowers(aten.diagonal_scatter)
def _diagonal_scatter(out: Out, x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    places = _diagonal_places(x, offset, dim1, dim2)
    return x.reshape(-1).at[places].set(source.astype(x.dtype)).reshape(x.shape)


@lowers(aten.diagonal_backward)
def _diagonal_backward(out: Out, gradient: Any, sizes: Any, offset: int, dim1: int, dim2: int) -> Any:
    return _diagonal_scatter(out, jnp.zeros(sizes, gradient.dtype), gradient, offset, dim1, dim2)


@lowers(aten.tril)
def _tril(out: Out, x: Any, diagonal: int = 0) -> Any:
    return jnp.tril(x, diagonal)


@lowers(aten.triu)
def _triu(out: Out, x: Any, diagonal: int = 0) -> Any:
    return jnp.triu(x, diagonal)


@lowers(aten.tril_indices)
def _tril_indices(out: Out, row: int, col: int, offset: int = 0, **kwargs: Any) -> Any:
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)))


@lowers(aten.triu_indices)
def _triu_indices(out: Out, row: int, col: int, offset: int = 0, **kwargs: Any) -> Any:
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col)))


@lowers(aten.eye)
def _eye(out: Out, *args: Any, **kwargs: Any) -> Any:
    return jnp.eye(*out.shape, dtype=out.dtype)


@lowers(aten.unfold, aten.unfold_copy)
def _unfold(out: Out, x: Any, dim: int, size: int, step: int) -> Any:
    count = (x.shape[dim] - size) // step + 1
    places = np.arange(count)[:, None] * step + np.arange(size)
    return jnp.moveaxis(jnp.take(x, places, axis=dim), dim % x.ndim + 1, -1)


@lowers(aten.unfold_backward)
def _unfold_backward(out: Out, gradient: Any, sizes: Any, dim: int, size: int, step: int) -> Any:
    zero = jnp.zeros(sizes, gradient.dtype)
    return jax.vjp(lambda x: _unfold(out, x, dim, size, step), zero)[1](gradient)[0]


@lowers(aten.pixel_shuffle)
def _pixel_shuffle(out: Out, x: Any, factor: int) -> Any:
    *lead, channels, height, width = x.shape
    x = x.reshape(*lead, channels // factor**2, factor, factor, height, width)
    n = len(lead)
    return jnp.transpose(x, (*range(n), n, n + 3, n + 1, n + 4, n + 2)).reshape(out.shape)
