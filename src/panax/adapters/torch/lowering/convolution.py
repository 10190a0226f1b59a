"""Convolutions of one to three dimensions, forward, transposed and backward."""

from typing import Any

import jax
import jax.numpy as jnp

from ....kernels.convolution import (
    ConvolutionGeometry,
    convolution_input_gradient,
    convolution_weight_gradient,
    convolve,
)
from .registry import OutputSpec, aten, register_lowering


def _geometry(
    weight_shape: tuple[int, ...],
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> ConvolutionGeometry:
    n = len(weight_shape) - 2
    stride, padding, dilation, extra = (
        tuple(v) * n if len(v) == 1 else tuple(v) for v in (stride, padding, dilation, output_padding)
    )
    if not transposed:
        return ConvolutionGeometry(
            stride=stride,
            padding=tuple((p, p) for p in padding),
            dilation=dilation,
            input_dilation=(1,) * n,
            groups=groups,
        )
    reach = [d * (k - 1) for d, k in zip(dilation, weight_shape[2:])]
    return ConvolutionGeometry(
        stride=(1,) * n,
        padding=tuple((r - p, r - p + e) for r, p, e in zip(reach, padding, extra)),
        dilation=dilation,
        input_dilation=stride,
        groups=groups,
    )


def _flip(weight: jax.Array, groups: int) -> jax.Array:
    """Convert the filter of a transposed convolution to that of a plain one, and back: flipped, inputs and
    outputs exchanged."""
    first, second, *taps = weight.shape
    turned = jnp.flip(weight, axis=range(2, weight.ndim)).reshape(groups, first // groups, second, *taps)
    return turned.swapaxes(1, 2).reshape(groups * second, first // groups, *taps)


@register_lowering(aten.convolution)
def _convolution(
    out: OutputSpec, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Any:  # fmt: skip
    """Convolve; PyTorch's filters have their outputs first, those of transposed convolutions their inputs."""
    geometry = _geometry(weight.shape, stride, padding, dilation, transposed, output_padding, groups)
    found = convolve(x, _flip(weight, groups) if transposed else weight, geometry)
    return found if bias is None else found + bias.reshape(1, -1, *(1,) * (x.ndim - 2)).astype(found.dtype)


@register_lowering(aten.convolution_backward)
def _convolution_backward(
    out: Any, gradient: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, output_mask: Any,
) -> Any:  # fmt: skip
    geometry = _geometry(weight.shape, stride, padding, dilation, transposed, output_padding, groups)
    used = _flip(weight, groups) if transposed else weight
    by_input = by_weight = None
    if output_mask[0]:
        by_input = convolution_input_gradient(gradient, used, x.shape, geometry)
    if output_mask[1]:
        by_weight = convolution_weight_gradient(x, gradient, used.shape, geometry)
        by_weight = _flip(by_weight, groups) if transposed else by_weight
    by_bias = gradient.astype(jnp.float32).sum((0, *range(2, x.ndim))) if output_mask[2] else None
    return by_input, by_weight, by_bias
