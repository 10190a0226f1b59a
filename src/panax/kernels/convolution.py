"""Convolutions with channels in the second dimension, their gradients, and the choice of a kernel for
each."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from panax.core.layout.layout import current_target
from panax.core.layout.target import Target
from panax.kernels.cpu.choice import XLA, timed_kernel
from panax.kernels.precision import accumulation_dtype
from panax.kernels.product import MatmulCase
from panax.kernels.registry import Kernel, KernelChoice, choose, register

MAX_SHIFTED_TAPS = 128
"""Maximum number of taps for which a depthwise convolution is a sum of shifted arrays: each of them is an
operation to compile."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionGeometry:
    """Positions that a convolution reads, with one value per spatial axis.

    Attributes:
        padding: Number of zeros before the first position and after the last one; if negative, positions are
            cropped.
        input_dilation: Distance between the positions of the input, with zeros in between: the stride of a
            transposed convolution.
        groups: Number of groups of channels; each output only depends on the inputs of its group.
    """

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    input_dilation: tuple[int, ...]
    groups: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionCase:
    """Properties that the choice of a kernel depends on.

    Attributes:
        inputs, outputs: Numbers of channels of one group.
        taps: Number of positions of the filter.
        strided, input_dilated: True if the stride or the input dilation exceeds 1.
        elements: Number of elements of the largest array.
    """

    matmul: MatmulCase
    inputs: int
    outputs: int
    taps: int
    strided: bool
    input_dilated: bool
    elements: int


class ConvolutionFunctions(NamedTuple):
    """One way to compute a convolution and its gradients, all in float32.

    Attributes:
        forward: (x, w, geometry) to the output.
        input_gradient: (d_out, w, the input's shape, geometry) to the input's gradient.
        weight_gradient: (x, d_out, the weights' shape, geometry) to the weights' gradient.
    """

    forward: Callable[..., jax.Array]
    input_gradient: Callable[..., jax.Array]
    weight_gradient: Callable[..., jax.Array]


def convolve(
    x: Float[Array, "images channels *places"],
    w: Float[Array, "outputs inputs *taps"],
    geometry: ConvolutionGeometry,
) -> Float[Array, "images outputs *positions"]:
    """Compute a cross-correlation, like every framework's convolution, accumulated in float32.

    Args:
        w: Weights; `inputs` are the channels of one group.

    >>> x, w = jnp.arange(4.0).reshape(1, 1, 4), jnp.array([[[1.0, 10.0]]])
    >>> geometry = ConvolutionGeometry(stride=(1,), padding=((0, 0),), dilation=(1,), input_dilation=(1,))
    >>> convolve(x, w, geometry).ravel().tolist()
    [10.0, 21.0, 32.0]
    """
    return _functions(x, w, x.shape, w.shape, geometry).forward(x, w, geometry)


def convolution_input_gradient(
    d_out: Float[Array, "images outputs *positions"],
    w: Float[Array, "outputs inputs *taps"],
    x_shape: tuple[int, ...],
    geometry: ConvolutionGeometry,
) -> Float[Array, "images channels *places"]:
    """Return the gradient of `convolve` by its input, given the output's."""
    return _functions(d_out, w, x_shape, w.shape, geometry).input_gradient(d_out, w, x_shape, geometry)


def convolution_weight_gradient(
    x: Float[Array, "images channels *places"],
    d_out: Float[Array, "images outputs *positions"],
    w_shape: tuple[int, ...],
    geometry: ConvolutionGeometry,
) -> Float[Array, "outputs inputs *taps"]:
    """Return the gradient of `convolve` by its weights, given the output's."""
    return _functions(x, d_out, x.shape, w_shape, geometry).weight_gradient(x, d_out, w_shape, geometry)


def output_shape(x_shape: tuple[int, ...], w_shape: tuple[int, ...], geometry: ConvolutionGeometry) -> tuple[int, ...]:
    """Return the spatial shape of a convolution's output."""
    return tuple(
        max(((size - 1) * spread + 1 if size else 0) + low + high - dilation * (taps - 1) - 1, -1) // stride + 1
        for size, taps, stride, (low, high), dilation, spread in zip(
            x_shape[2:], w_shape[2:], geometry.stride, geometry.padding, geometry.dilation, geometry.input_dilation
        )
    )


def _functions(
    a: jax.Array, b: jax.Array, x_shape: tuple[int, ...], w_shape: tuple[int, ...], geometry: ConvolutionGeometry
) -> ConvolutionFunctions:
    choice = choose_convolution(describe_case(a, b, x_shape, w_shape, geometry), current_target())
    return choice.kernel.run


def describe_case(
    a: jax.Array, b: jax.Array, x_shape: tuple[int, ...], w_shape: tuple[int, ...], geometry: ConvolutionGeometry
) -> ConvolutionCase:
    """Describe a convolution of these shapes; `a` and `b` are the arrays that are read."""
    out_size = x_shape[0] * w_shape[0] * math.prod(output_shape(x_shape, w_shape, geometry))
    products = out_size * math.prod(w_shape[1:]) // math.prod(geometry.input_dilation)
    # Bfloat16 is multiplied as float32, so one kernel serves both, and a gradient of the other dtype.
    narrow = {a.dtype, b.dtype} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}
    return ConvolutionCase(
        matmul=dataclasses.replace(MatmulCase.of(products, a, b), dtype="float32" if narrow else ""),
        inputs=w_shape[1],
        outputs=w_shape[0] // geometry.groups,
        taps=math.prod(w_shape[2:]),
        strided=max(geometry.stride) > 1,
        input_dilated=max(geometry.input_dilation) > 1,
        elements=max(out_size, math.prod(x_shape), math.prod(w_shape)),
    )


def choose_convolution(case: ConvolutionCase, target: Target) -> KernelChoice:
    """Choose the kernel of a convolution."""
    return choose("convolution", case, target, timed=timed_kernel("convolution", case.matmul.dtype), yields=True)


def _sum_dtype(x: Any) -> Any:
    return accumulation_dtype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype


def _forward(x: Any, w: Any, geometry: ConvolutionGeometry) -> jax.Array:
    return lax.conv_general_dilated(
        x,
        w,
        geometry.stride,
        geometry.padding,
        lhs_dilation=geometry.input_dilation,
        rhs_dilation=geometry.dilation,
        feature_group_count=geometry.groups,
        preferred_element_type=_sum_dtype(x),
    )


def _by_input(d_out: Any, w: Any, x_shape: tuple[int, ...], geometry: ConvolutionGeometry) -> jax.Array:
    # It is linear in the input, so any input works.
    transpose = jax.linear_transpose(lambda x: _forward(x, w, geometry), jax.ShapeDtypeStruct(x_shape, w.dtype))
    return transpose(d_out.astype(_sum_dtype(w)))[0]


def _by_weights(x: Any, d_out: Any, w_shape: tuple[int, ...], geometry: ConvolutionGeometry) -> jax.Array:
    transpose = jax.linear_transpose(lambda w: _forward(x, w, geometry), jax.ShapeDtypeStruct(w_shape, x.dtype))
    return transpose(d_out.astype(_sum_dtype(x)))[0]


def _padded(x: Any, geometry: ConvolutionGeometry) -> jax.Array:
    return lax.pad(
        x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *((low, high, 0) for low, high in geometry.padding)]
    )


def _shifts(
    x: jax.Array, w_shape: tuple[int, ...], out_places: tuple[int, ...], geometry: ConvolutionGeometry
) -> list[tuple[tuple[int, ...], jax.Array]]:
    """Return the input of each tap of a depthwise filter: the tap's indices, and the padded input's values
    for all outputs."""
    shifts = []
    for tap in np.ndindex(*w_shape[2:]):
        starts = [t * dilation for t, dilation in zip(tap, geometry.dilation)]
        ends = [start + (count - 1) * s + 1 for start, count, s in zip(starts, out_places, geometry.stride)]
        shifts.append((tap, lax.slice(x, (0, 0, *starts), (*x.shape[:2], *ends), (1, 1, *geometry.stride))))
    return shifts


def _shifted_forward(x: Any, w: Any, geometry: ConvolutionGeometry) -> jax.Array:
    wide = _sum_dtype(x)
    places = output_shape(x.shape, w.shape, geometry)
    total = jnp.zeros((x.shape[0], w.shape[0], *places), wide)
    for tap, shifted in _shifts(_padded(x, geometry), w.shape, places, geometry):
        weight = w[(slice(None), 0, *tap)].astype(wide)
        total = total + shifted.astype(wide) * weight.reshape(1, -1, *(1,) * len(places))
    return total


def _shifted_by_input(d_out: Any, w: Any, x_shape: tuple[int, ...], geometry: ConvolutionGeometry) -> jax.Array:
    forward = lambda x: _shifted_forward(x, w, geometry)  # noqa: E731
    transpose = jax.linear_transpose(forward, jax.ShapeDtypeStruct(x_shape, _sum_dtype(w)))
    return transpose(d_out.astype(_sum_dtype(w)))[0]


def _shifted_by_weights(x: Any, d_out: Any, w_shape: tuple[int, ...], geometry: ConvolutionGeometry) -> jax.Array:
    wide = _sum_dtype(x)
    axes = (0, *range(2, x.ndim))
    sums = [
        (shifted.astype(wide) * d_out.astype(wide)).sum(axes)
        for _, shifted in _shifts(_padded(x, geometry), w_shape, d_out.shape[2:], geometry)
    ]
    return jnp.stack(sums, axis=-1).reshape(w_shape)


def _shifted_limit(case: ConvolutionCase, target: Target) -> str | None:
    if case.inputs != 1 or case.outputs != 1:
        return "it is for depthwise convolutions, of one channel to a group"
    if case.taps > MAX_SHIFTED_TAPS:
        return f"the filter has more than {MAX_SHIFTED_TAPS} taps"
    return "the input is dilated" if case.input_dilated else None


register(
    Kernel(work="convolution", name=XLA, run=ConvolutionFunctions(_forward, _by_input, _by_weights), rank=10),
)
register(
    Kernel(
        work="convolution",
        name="shifted",
        run=ConvolutionFunctions(_shifted_forward, _shifted_by_input, _shifted_by_weights),
        platforms=("cpu",),
        rank=20,
        limit=_shifted_limit,
    )
)
