"""Convolutions of one to three dimensions, forward, transposed and backward."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .registry import Out, aten, lowers


def convolve(
    x: Any, weight: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int
) -> jax.Array:
    """PyTorch's convolution: channels second, the filter's outputs first (inputs first where it is transposed)."""
    n = x.ndim - 2
    stride, padding, dilation = (list(v) * n if len(v) == 1 else list(v) for v in (stride, padding, dilation))
    if not transposed:
        return lax.conv_general_dilated(
            x, weight, stride, [(p, p) for p in padding], rhs_dilation=dilation, feature_group_count=groups,
            preferred_element_type=jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else None,
        )  # fmt: skip
    extra = list(output_padding) * n if len(output_padding) == 1 else list(output_padding)
    inputs, outputs = weight.shape[:2]
    # A transposed convolution is one over the input spread out by the stride, with the filter turned around.
    turned = jnp.flip(weight, axis=range(2, 2 + n)).reshape(groups, inputs // groups, outputs, *weight.shape[2:])
    turned = turned.swapaxes(1, 2).reshape(groups * outputs, inputs // groups, *weight.shape[2:])
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:])]
    return lax.conv_general_dilated(
        x, turned, [1] * n, [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra)], lhs_dilation=stride,
        rhs_dilation=dilation, feature_group_count=groups,
        preferred_element_type=jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else None,
    )  # fmt: skip


@lowers(aten.convolution)
def _convolution(out: Out, x: Any, weight: Any, bias: Any, *settings: Any) -> Any:
    found = convolve(x, weight, *settings)
    return found if bias is None else found + bias.reshape(1, -1, *(1,) * (x.ndim - 2)).astype(found.dtype)


@lowers(aten.convolution_backward)
def _convolution_backward(
    out: Any, gradient: Any, x: Any, weight: Any, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, wanted: Any,
) -> Any:  # fmt: skip
    def forward(x: Any, weight: Any) -> Any:
        return convolve(x, weight, stride, padding, dilation, transposed, output_padding, groups)

    # It is linear in each, so the transposes need no value of the other result.
    shape, transpose = jax.vjp(forward, x, weight)
    by_input, by_weight = transpose(gradient.astype(shape.dtype))
    by_bias = gradient.astype(jnp.float32).sum((0, *range(2, x.ndim))) if wanted[2] else None
    return (by_input if wanted[0] else None), (by_weight if wanted[1] else None), by_bias
