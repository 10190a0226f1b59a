"""Layer, group and batch normalization, forward and backward, with the statistics in float32."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .registry import aten, register_lowering, upcast


@register_lowering(aten.native_layer_norm)
def _layer_norm(out: Any, x: Any, shape: Any, weight: Any, bias: Any, eps: Any) -> Any:
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    x = upcast(x)
    mean = x.mean(dims, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(x - mean).mean(dims, keepdims=True) + eps)
    y = (x - mean) * inverse
    y = y if weight is None else y * upcast(weight)
    return (y if bias is None else y + upcast(bias)), mean, inverse


@register_lowering(aten.native_layer_norm_backward)
def _layer_norm_backward(
    out: Any, gradient: Any, x: Any, shape: Any, mean: Any, inverse: Any, weight: Any, bias: Any, output_mask: Any
) -> Any:
    dims, lead = tuple(range(x.ndim - len(shape), x.ndim)), tuple(range(x.ndim - len(shape)))
    g, x = upcast(gradient), upcast(x)
    normal = (x - mean) * inverse
    scaled = g if weight is None else g * upcast(weight)
    by_input = inverse * (
        scaled - scaled.mean(dims, keepdims=True) - normal * (scaled * normal).mean(dims, keepdims=True)
    )
    by_weight = (g * normal).sum(lead) if output_mask[1] and weight is not None else None
    return by_input, by_weight, (g.sum(lead) if output_mask[2] and bias is not None else None)


@register_lowering(aten._fused_rms_norm)
def _rms_norm(out: Any, x: Any, shape: Any, weight: Any, eps: Any) -> Any:
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    eps = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    x = upcast(x)
    inverse = jax.lax.rsqrt(jnp.square(x).mean(dims, keepdims=True) + eps)
    return (x * inverse if weight is None else x * inverse * upcast(weight)), inverse


@register_lowering(aten._fused_rms_norm_backward)
def _rms_norm_backward(out: Any, gradient: Any, x: Any, shape: Any, inverse: Any, weight: Any, output_mask: Any) -> Any:
    dims, lead = tuple(range(x.ndim - len(shape), x.ndim)), tuple(range(x.ndim - len(shape)))
    g, x = upcast(gradient), upcast(x)
    normal = x * inverse
    scaled = g if weight is None else g * upcast(weight)
    by_input = inverse * (scaled - normal * (scaled * normal).mean(dims, keepdims=True))
    return by_input, ((g * normal).sum(lead) if output_mask[1] and weight is not None else None)


@register_lowering(aten.native_group_norm)
def _group_norm(
    out: Any, x: Any, weight: Any, bias: Any, rows: int, channels: int, pixels: int, groups: int, eps: Any
) -> Any:
    grouped = upcast(x).reshape(rows, groups, -1)
    mean = grouped.mean(-1)
    inverse = jax.lax.rsqrt(jnp.square(grouped - mean[..., None]).mean(-1) + eps)
    y = ((grouped - mean[..., None]) * inverse[..., None]).reshape(x.shape)
    y = y if weight is None else y * _channels(weight, x.ndim)
    return (y if bias is None else y + _channels(bias, x.ndim)), mean, inverse


@register_lowering(aten.native_group_norm_backward)
def _group_norm_backward(
    out: Any,
    gradient: Any,
    x: Any,
    mean: Any,
    inverse: Any,
    weight: Any,
    rows: int,
    channels: int,
    pixels: int,
    groups: int,
    output_mask: Any,
) -> Any:
    g = upcast(gradient)
    normal = ((upcast(x).reshape(rows, groups, -1) - mean[..., None]) * inverse[..., None]).reshape(x.shape)
    scaled = (g if weight is None else g * _channels(weight, x.ndim)).reshape(rows, groups, -1)
    each = normal.reshape(rows, groups, -1)
    by_input = inverse[..., None] * (
        scaled - scaled.mean(-1, keepdims=True) - each * (scaled * each).mean(-1, keepdims=True)
    )
    dims = (0, *range(2, x.ndim))
    return (
        by_input.reshape(x.shape),
        ((g * normal).sum(dims) if output_mask[1] else None),
        (g.sum(dims) if output_mask[2] else None),
    )


def _channels(value: Any, ndim: int) -> Any:
    return upcast(value).reshape(1, -1, *(1,) * (ndim - 2))


class _ChannelArrays(NamedTuple):
    """Arrays with one element per channel: scale and shift, running mean and variance; each may be None."""

    weight: Any
    bias: Any
    mean: Any
    variance: Any


def _batch_norm(x: Any, channels: _ChannelArrays, training: bool, momentum: Any, eps: Any) -> Any:
    """Return the output, the batch's mean and inverse deviation, and the new running mean and variance."""
    weight, bias, mean, variance = channels
    dims = (0, *range(2, x.ndim))
    wide_x = upcast(x)
    if training:
        used_mean = wide_x.mean(dims)
        used_variance = jnp.square(wide_x - _channels(used_mean, x.ndim)).mean(dims)
    else:
        used_mean, used_variance = upcast(mean), upcast(variance)
    inverse = jax.lax.rsqrt(used_variance + eps)
    y = (wide_x - _channels(used_mean, x.ndim)) * _channels(inverse, x.ndim)
    y = y if weight is None else y * _channels(weight, x.ndim)
    y = y if bias is None else y + _channels(bias, x.ndim)
    if training and mean is not None:
        count = math.prod(x.shape[d] for d in dims)
        mean = mean + momentum * (used_mean - mean)
        variance = variance + momentum * (used_variance * (count / max(count - 1, 1)) - variance)
    return y, used_mean, inverse, mean, variance


@register_lowering(aten._native_batch_norm_legit_functional)
def _batch_norm_functional(out: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, *settings: Any) -> Any:
    y, used, inverse, mean, variance = _batch_norm(x, _ChannelArrays(weight, bias, mean, variance), *settings)
    if not settings[0]:
        used, inverse = (jnp.zeros(part.shape, part.dtype) for part in out[1:3])
    return y, used, inverse, mean, variance


@register_lowering(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_no_training(
    out: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: Any, eps: Any
) -> Any:
    y, *_ = _batch_norm(x, _ChannelArrays(weight, bias, mean, variance), False, momentum, eps)
    return y, jnp.zeros(out[1].shape), jnp.zeros(out[2].shape)


@register_lowering(aten._native_batch_norm_legit.no_stats)
def _batch_norm_no_stats(out: Any, x: Any, weight: Any, bias: Any, training: bool, momentum: Any, eps: Any) -> Any:
    return _batch_norm(x, _ChannelArrays(weight, bias, None, None), training, momentum, eps)[:3]


@register_lowering(aten.native_batch_norm_backward)
def _batch_norm_backward(
    out: Any,
    gradient: Any,
    x: Any,
    weight: Any,
    mean: Any,
    variance: Any,
    used: Any,
    inverse: Any,
    training: bool,
    eps: Any,
    output_mask: Any,
) -> Any:
    dims = (0, *range(2, x.ndim))
    g, x = upcast(gradient), upcast(x)
    if not training:
        used, inverse = upcast(mean), jax.lax.rsqrt(upcast(variance) + eps)
    normal = (x - _channels(used, x.ndim)) * _channels(inverse, x.ndim)
    scale = _channels(inverse, x.ndim) * (1 if weight is None else _channels(weight, x.ndim))
    by_input = g * scale
    if training:
        by_input = scale * (g - g.mean(dims, keepdims=True) - normal * (g * normal).mean(dims, keepdims=True))
    by_weight = (g * normal).sum(dims) if output_mask[1] else None
    return (by_input if output_mask[0] else None), by_weight, (g.sum(dims) if output_mask[2] else None)


@register_lowering(aten._weight_norm_interface)
def _weight_norm(out: Any, v: Any, g: Any, dim: int = 0) -> Any:
    dims = tuple(d for d in range(v.ndim) if d != dim)
    norm = jnp.sqrt(jnp.square(v).sum(dims, keepdims=True))
    return v * (g / norm), norm


@register_lowering(aten._weight_norm_interface_backward)
def _weight_norm_backward(out: Any, gradient: Any, v: Any, g: Any, norms: Any, dim: int) -> Any:
    def forward(v: Any, g: Any) -> Any:
        return _weight_norm(out, v, g, dim)[0]

    return jax.vjp(forward, v, g)[1](gradient)
