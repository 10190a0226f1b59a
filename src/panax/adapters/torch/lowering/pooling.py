"""Pooling and resizing of images and signals."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....core.errors import RecipeError
from .registry import OutputSpec, aten, register_lowering


def _each(value: Any, n: int) -> list[int]:
    value = list(value) if isinstance(value, tuple | list) else [value]
    return value * n if len(value) == 1 else value


def _windows(
    sizes: Any, outputs: Any, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each output (rows) and element of its window (columns), the flat index in the input, and
    True if it is inside."""
    n = len(sizes)
    grids = []
    for dim in range(n):
        at = np.arange(outputs[dim])[:, None] * stride[dim] - padding[dim] + np.arange(kernel[dim]) * dilation[dim]
        grids.append(at)
    places = np.zeros((*outputs, *kernel), np.int64)
    inside = np.ones((*outputs, *kernel), bool)
    for dim, at in enumerate(grids):
        shape = [1] * (2 * n)
        shape[dim], shape[n + dim] = at.shape
        at = at.reshape(shape)
        places = places * sizes[dim] + np.clip(at, 0, sizes[dim] - 1)
        inside = inside & (at >= 0) & (at < sizes[dim])
    return places.reshape(int(np.prod(outputs)), -1), inside.reshape(int(np.prod(outputs)), -1)


def _first_maximum(x: Any, outputs: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Any:
    """Return the index in the flat input of the largest element of each window (the first of equals)."""
    n = len(outputs)
    places, inside = _windows(x.shape[-n:], outputs, kernel, stride, padding, dilation)
    seen = jnp.where(inside, x.reshape(*x.shape[:-n], -1)[..., places], jnp.asarray(-jnp.inf, x.dtype))
    best = jnp.argmax(seen, axis=-1)
    index = jnp.take_along_axis(jnp.broadcast_to(places, seen.shape), best[..., None], axis=-1)[..., 0]
    return index.reshape(*x.shape[:-n], *outputs)


def _ends(sizes: Any, outputs: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> list[int]:
    """Return how far the last windows extend past the end of each dimension; negative if they end before it."""
    return [
        (o - 1) * s + (k - 1) * d + 1 - size - p
        for size, o, k, s, p, d in zip(sizes, outputs, kernel, stride, padding, dilation)
    ]


UNROLLED_TAPS = 32
"""Size of a window up to which maxima are found tap by tap; above, by window operations."""


def _first_maxima(x: Any, outputs: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Any, Any]:
    """Return each window's maximum, and the index of its first tap with that value; NaN counts as the largest
    value, as in PyTorch."""
    n = len(outputs)
    lead = [(0, 0, 0)] * (x.ndim - n)
    ends = [max(end, 0) for end in _ends(x.shape[-n:], outputs, kernel, stride, padding, dilation)]
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    padded = lax.pad(x, jnp.asarray(lowest, x.dtype), [*lead, *((p, e, 0) for p, e in zip(padding, ends))])
    best = jnp.full((*x.shape[:-n], *outputs), lowest, x.dtype)
    # If nothing is larger than the lowest value, the first tap inside the image counts.
    _, inside = _windows(x.shape[-n:], outputs, kernel, stride, padding, dilation)
    place = jnp.broadcast_to(jnp.asarray(inside.argmax(1).reshape(outputs), jnp.int32), best.shape)
    for number, tap in enumerate(np.ndindex(*kernel)):
        starts = [t * d for t, d in zip(tap, dilation)]
        limits = [start + (count - 1) * s + 1 for start, count, s in zip(starts, outputs, stride)]
        tap_values = lax.slice(
            padded, (*[0] * len(lead), *starts), (*x.shape[:-n], *limits), (*[1] * len(lead), *stride)
        )
        larger = (tap_values > best) | (tap_values != tap_values)
        best, place = jnp.where(larger, tap_values, best), jnp.where(larger, number, place)
    return best, place


def _flat_places(taps: Any, sizes: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Any:
    """Return the flat indices in the image of the taps with these indices in their windows."""
    n = len(sizes)
    flat = jnp.zeros(taps.shape, jnp.int32)
    for dim, tap in enumerate(jnp.unravel_index(taps, tuple(kernel))):
        start = jnp.arange(taps.shape[taps.ndim - n + dim], dtype=jnp.int32) * stride[dim] - padding[dim]
        flat = flat * sizes[dim] + start.reshape(-1, *(1,) * (n - dim - 1)) + tap.astype(jnp.int32) * dilation[dim]
    return flat


def _to_first_maxima(
    gradient: Any, first_tap: Any, sizes: Any, kernel: Any, stride: Any, padding: Any, dilation: Any
) -> Any:
    """Add each output's gradient to the input element at its window's tap `first_tap`.

    Input positions that are equal modulo the stride (a phase) are reached by the same taps, each at a
    different distance, so a phase is a sum of shifted arrays; the phases are then interleaved.
    """
    n = len(sizes)
    lead = gradient.ndim - n
    counts = [-(-(size + 2 * p) // s) for size, p, s in zip(sizes, padding, stride)]
    taps = list(enumerate(np.ndindex(*kernel)))

    def phase(first: tuple[int, ...]) -> Any:
        total = jnp.zeros((*gradient.shape[:lead], *counts), gradient.dtype)
        for number, tap in taps:
            distances = [t * d - r for t, d, r in zip(tap, dilation, first)]
            if any(distance % s for distance, s in zip(distances, stride)):
                continue
            shifts = [distance // s for distance, s in zip(distances, stride)]
            pads = [(k, count - k - size, 0) for k, count, size in zip(shifts, counts, gradient.shape[lead:])]
            routed = jnp.where(first_tap == number, gradient, jnp.zeros((), gradient.dtype))
            total = total + lax.pad(routed, jnp.zeros((), routed.dtype), [*[(0, 0, 0)] * lead, *pads])
        return total

    def interleave(first: tuple[int, ...]) -> Any:
        dim = len(first)
        if dim == n:
            return phase(first)
        parts = [interleave((*first, r)) for r in range(stride[dim])]
        stacked = jnp.stack(parts, axis=lead + dim + 1)
        return stacked.reshape(*stacked.shape[: lead + dim], -1, *stacked.shape[lead + dim + 2 :])

    padded_gradient = interleave(())
    return padded_gradient[(..., *(slice(p, p + size) for p, size in zip(padding, sizes)))]


def _max_pool(n: int) -> tuple[Any, Any]:
    def maxima(x: Any, outputs: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Any:
        lead = (1,) * (x.ndim - n)
        ends = _ends(x.shape[-n:], outputs, kernel, stride, padding, dilation)
        pads = [(0, 0)] * (x.ndim - n) + [(p, max(e, 0)) for p, e in zip(padding, ends)]
        low = -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
        # A constant: only with one does JAX recognize a maximum, which it can differentiate.
        return lax.reduce_window(
            x,
            np.asarray(low, x.dtype),
            lax.max,
            (*lead, *kernel),
            (*lead, *stride),
            pads,
            window_dilation=(*lead, *dilation),
        )

    def settings(kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False) -> Any:
        kernel = _each(kernel, n)
        return kernel, _each(stride or kernel, n), _each(padding, n), _each(dilation, n)

    def forward(out: Any, x: Any, *arguments: Any) -> Any:
        outputs, window = out[0].shape[-n:], settings(*arguments)
        if np.prod(window[0]) <= UNROLLED_TAPS:
            best, place = _first_maxima(x, outputs, *window)
            return best, _flat_places(place, x.shape[-n:], *window)
        # If only the backward pass reads the indices, the compiler drops them.
        return maxima(x, outputs, *window), _first_maximum(x, outputs, *window)

    def backward(out: OutputSpec, gradient: Any, x: Any, *arguments: Any) -> Any:
        *window_arguments, _ = arguments
        outputs, window = gradient.shape[-n:], settings(*window_arguments)
        if np.prod(window[0]) <= UNROLLED_TAPS:
            _, place = _first_maxima(x, outputs, *window)
            return _to_first_maxima(gradient, place, x.shape[-n:], *window)
        return jax.vjp(lambda x: maxima(x, outputs, *window), x)[1](gradient)[0]

    return forward, backward


for _n in (2, 3):
    _forward, _backward = _max_pool(_n)
    register_lowering(getattr(aten, f"max_pool{_n}d_with_indices"))(_forward)
    register_lowering(getattr(aten, f"max_pool{_n}d_with_indices_backward"))(_backward)


class _AverageWindow(NamedTuple):
    """Windows of PyTorch's average pooling: its arguments, by its names and in its order."""

    kernel_size: Any
    stride: Any = ()
    padding: Any = 0
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: Any = None


def _averaged(x: Any, n: int, outputs: Any, window: _AverageWindow) -> Any:
    kernel, divisor = _each(window.kernel_size, n), window.divisor_override
    stride, padding = _each(window.stride or kernel, n), _each(window.padding, n)
    lead = (1,) * (x.ndim - n)
    # If the last window extends past the end (`ceil_mode`), there are zeros.
    ends = _ends(x.shape[-n:], outputs, kernel, stride, padding, [1] * n)
    pads = [(0, 0)] * (x.ndim - n) + [(p, max(e, -size)) for p, e, size in zip(padding, ends, x.shape[-n:])]
    total = lax.reduce_window(x.astype(jnp.float32), 0.0, lax.add, (*lead, *kernel), (*lead, *stride), pads)
    if divisor:
        return total / divisor
    sizes = x.shape[-n:]
    ones = np.ones(sizes, np.float32)
    if window.count_include_pad:
        ones = np.pad(ones, [(p, p) for p in padding], constant_values=1)
        inner = [(0, max(e - p, 0)) if e > p else (0, min(e - p, 0)) for e, p in zip(ends, padding)]
    else:
        inner = [(p, e) for p, e in zip(padding, ends)]
    count = lax.reduce_window(jnp.asarray(ones), 0.0, lax.add, tuple(kernel), tuple(stride), inner)
    return total / count


def _average(n: int) -> Any:
    def apply(out: OutputSpec, x: Any, *arguments: Any, **keywords: Any) -> Any:
        return _averaged(x, n, out.shape[-n:], _AverageWindow(*arguments, **keywords))

    return apply


def _average_backward(n: int) -> Any:
    def apply(out: OutputSpec, gradient: Any, x: Any, *arguments: Any) -> Any:
        def forward(x: Any) -> Any:
            return _averaged(x, n, gradient.shape[-n:], _AverageWindow(*arguments))

        return jax.vjp(forward, x)[1](gradient.astype(jnp.float32))[0]

    return apply


for _n in (2, 3):
    register_lowering(getattr(aten, f"avg_pool{_n}d"))(_average(_n))
    register_lowering(getattr(aten, f"avg_pool{_n}d_backward"))(_average_backward(_n))
register_lowering(aten.avg_pool1d)(_average(1))


def _adaptive(x: Any, outputs: Any) -> Any:
    """Average over windows that cut each dimension into the given number of nearly equal, possibly
    overlapping parts: one matrix each."""
    n = len(outputs)
    for dim, count in zip(range(x.ndim - n, x.ndim), outputs):
        size = x.shape[dim]
        matrix = np.zeros((count, size), np.float32)
        for i in range(count):
            low, high = i * size // count, -(-(i + 1) * size // count)
            matrix[i, low:high] = 1 / (high - low)
        x = jnp.moveaxis(jnp.tensordot(x.astype(jnp.float32), jnp.asarray(matrix), [[dim], [1]]), -1, dim)
    return x


@register_lowering(aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d, aten.adaptive_avg_pool1d)
def _adaptive_average(out: OutputSpec, x: Any, outputs: Any) -> Any:
    return _adaptive(x, outputs)


@register_lowering(aten._adaptive_avg_pool2d_backward, aten._adaptive_avg_pool3d_backward)
def _adaptive_average_backward(out: OutputSpec, gradient: Any, x: Any) -> Any:
    outputs = gradient.shape[-2:] if gradient.shape[:-2] == x.shape[:-2] else gradient.shape[-3:]
    return jax.vjp(lambda x: _adaptive(x, outputs), x)[1](gradient.astype(jnp.float32))[0]


def _nearest_places(size: int, count: int, scale: Any, exact: bool) -> np.ndarray:
    ratio = np.float32(1 / scale) if scale else np.float32(size / count)
    at = np.arange(count, dtype=np.float32)
    at = (at + np.float32(0.5)) * ratio if exact else at * ratio
    return np.minimum(np.floor(at).astype(np.int64), size - 1)


def _linear(size: int, count: int, corners: bool, scale: Any) -> np.ndarray:
    """Return the matrix that interpolates `size` points at `count`."""
    if corners:
        at = np.arange(count) * ((size - 1) / (count - 1) if count > 1 else 0.0)
    else:
        at = np.maximum((np.arange(count) + 0.5) * (1 / scale if scale else size / count) - 0.5, 0)
    low = np.minimum(np.floor(at).astype(int), size - 1)
    high = np.minimum(low + 1, size - 1)
    matrix = np.zeros((count, size), np.float32)
    np.add.at(matrix, (np.arange(count), low), 1 - (at - low))
    np.add.at(matrix, (np.arange(count), high), at - low)
    return matrix


def _cubic(size: int, count: int, corners: bool, scale: Any) -> np.ndarray:
    a = -0.75
    if corners:
        at = np.arange(count) * ((size - 1) / (count - 1) if count > 1 else 0.0)
    else:
        at = (np.arange(count) + 0.5) * (1 / scale if scale else size / count) - 0.5
    low = np.floor(at).astype(int)
    matrix = np.zeros((count, size), np.float32)
    for offset in range(-1, 3):
        t = np.abs(at - (low + offset))
        near = (a + 2) * t**3 - (a + 3) * t**2 + 1
        far = a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
        np.add.at(matrix, (np.arange(count), np.clip(low + offset, 0, size - 1)), np.where(t <= 1, near, far))
    return matrix


def _resized(x: Any, n: int, outputs: Any, how: str, corners: bool, scales: Any) -> Any:
    for dim, count, scale in zip(range(x.ndim - n, x.ndim), outputs, scales):
        size = x.shape[dim]
        if how.startswith("nearest"):
            x = jnp.take(x, _nearest_places(size, count, scale, how == "nearest-exact"), axis=dim)
            continue
        matrix = (_linear if how == "linear" else _cubic)(size, count, corners, scale)
        x = jnp.moveaxis(jnp.tensordot(x.astype(jnp.float32), jnp.asarray(matrix), [[dim], [1]]), -1, dim)
    return x


def _resize(n: int, how: str) -> tuple[Any, Any]:
    has_corners = how in ("linear", "cubic")

    def settings(arguments: Any) -> tuple[bool, Any]:
        arguments = list(arguments)
        corners = arguments.pop(0) if has_corners else False
        scales = arguments + [None] * (n - len(arguments))
        return corners, scales

    def forward(out: OutputSpec, x: Any, size: Any, *arguments: Any) -> Any:
        corners, scales = settings(arguments)
        return _resized(x, n, out.shape[-n:], how, corners, scales)

    def backward(out: OutputSpec, gradient: Any, size: Any, input_size: Any, *arguments: Any) -> Any:
        corners, scales = settings(arguments)
        zero = jnp.zeros(input_size, jnp.float32)
        function = lambda x: _resized(x, n, gradient.shape[-n:], how, corners, scales)  # noqa: E731
        return jax.vjp(function, zero)[1](gradient.astype(jnp.float32))[0]

    return forward, backward


_RESIZES = {
    "upsample_linear1d": (1, "linear"), "upsample_bilinear2d": (2, "linear"), "upsample_trilinear3d": (3, "linear"),
    "upsample_bicubic2d": (2, "cubic"),
    **{f"upsample_nearest{n}d": (n, "nearest") for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": (n, "nearest-exact") for n in (1, 2, 3)},
}  # fmt: skip
for _name, (_n, _how) in _RESIZES.items():
    _forward, _backward = _resize(_n, _how)
    register_lowering(getattr(aten, _name).default)(_forward)
    register_lowering(getattr(aten, f"{_name}_backward").default)(_backward)


def _sampled(x: Any, grid: Any, mode: int, padding: int, corners: bool) -> Any:
    """Sample at fractional positions, -1 to 1 from edge to edge. mode: 0 bilinear, 1 nearest; padding: 0
    zeros, 1 border."""
    if mode > 1 or padding > 1:
        raise RecipeError(
            "grid_sample supports the modes bilinear and nearest, with the paddings zeros and border; use these"
        )
    sizes = x.shape[-1], x.shape[-2]
    at = [
        ((grid[..., d] + 1) * (n - 1) / 2) if corners else ((grid[..., d] + 1) * n - 1) / 2 for d, n in enumerate(sizes)
    ]
    if padding == 1:
        at = [jnp.clip(a, 0, n - 1) for a, n in zip(at, sizes)]
    row = jnp.arange(x.shape[0]).reshape(-1, 1, 1)

    def read(across: Any, down: Any) -> Any:
        inside = (across >= 0) & (across < sizes[0]) & (down >= 0) & (down < sizes[1])
        place = [jnp.clip(a, 0, n - 1).astype(jnp.int32) for a, n in ((across, sizes[0]), (down, sizes[1]))]
        pixels = jnp.moveaxis(x, 1, -1)[row, place[1], place[0]]
        return jnp.where(inside[..., None], pixels, 0)

    if mode == 1:
        return jnp.moveaxis(read(jnp.round(at[0]), jnp.round(at[1])), -1, 1)
    low = [jnp.floor(a) for a in at]
    share = [(a - base)[..., None] for a, base in zip(at, low)]
    total = sum(
        (share[0] if i else 1 - share[0]) * (share[1] if j else 1 - share[1]) * read(low[0] + i, low[1] + j)
        for i in (0, 1)
        for j in (0, 1)
    )
    return jnp.moveaxis(cast(Any, total), -1, 1)


@register_lowering(aten.grid_sampler_2d)
def _grid_sample(out: OutputSpec, x: Any, grid: Any, mode: int, padding: int, corners: bool) -> Any:
    return _sampled(x, grid, mode, padding, corners)


@register_lowering(aten.grid_sampler_2d_backward)
def _grid_sample_backward(
    out: Any, gradient: Any, x: Any, grid: Any, mode: int, padding: int, corners: bool, output_mask: Any
) -> Any:
    return jax.vjp(lambda x, grid: _sampled(x, grid, mode, padding, corners), x, grid)[1](gradient)


@register_lowering(aten.im2col)
def _im2col(out: OutputSpec, x: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    sizes = x.shape[-2:]
    outputs = [
        (s + 2 * p - d * (k - 1) - 1) // t + 1 for s, p, d, k, t in zip(sizes, padding, dilation, kernel, stride)
    ]
    indices, inside = _windows(sizes, outputs, kernel, stride, padding, dilation)
    windows = jnp.where(inside, x.reshape(*x.shape[:-2], -1)[..., indices], 0)
    return jnp.swapaxes(windows, -1, -2).reshape(out.shape)


@register_lowering(aten.col2im)
def _col2im(out: OutputSpec, x: Any, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    zero = jnp.zeros(out.shape, x.dtype)
    columns = OutputSpec(x.shape, x.dtype, out.key)
    return jax.vjp(lambda image: _im2col(columns, image, kernel, dilation, padding, stride), zero)[1](x)[0]
