"""Convolutions on CPU by `csrc/convolution.c`: kernels for "convolution".

XLA's convolutions reach a third of the speed of its matmuls, and its weight gradient of a strided filter less
than that. The C file fills the panels of its matmuls directly from the image, so no part of the image is
duplicated in memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from panax.core.layout.target import Target
from panax.kernels.convolution import ConvolutionCase, ConvolutionFunctions, ConvolutionGeometry, output_shape
from panax.kernels.cpu.native import KERNELS, OWN, call_native
from panax.kernels.cpu.products import native_limit
from panax.kernels.registry import Kernel, register

NUM_SPATIAL_AXES = 3
"""Number of spatial axes in the C file; if there are fewer, the first ones have size one."""

MAX_ELEMENTS = 2**30
"""Maximum number of elements that the C file can index."""

MIN_OUTPUTS = 4
"""Minimum number of output channels of a group: below it, most of a tile of sums would be empty."""


def native_convolution(
    x: Float[Array, "images channels *places"],
    w: Float[Array, "outputs inputs *taps"],
    geometry: ConvolutionGeometry,
) -> Float[Array, "images outputs *positions"]:
    """Compute `convolve`."""
    return _convolution(x, w, (w.shape[0], *output_shape(x.shape, w.shape, geometry)), geometry, exchanged=False)


def native_input_gradient(
    d_out: Float[Array, "images outputs *positions"],
    w: Float[Array, "outputs inputs *taps"],
    x_shape: tuple[int, ...],
    geometry: ConvolutionGeometry,
) -> Float[Array, "images channels *places"]:
    """Compute `convolution_input_gradient`: a convolution of the output's gradient, with strides and input
    dilations exchanged."""
    reach = [d * (taps - 1) for d, taps in zip(geometry.dilation, w.shape[2:])]
    # The output's shape is given, so the padding after the last position is not needed.
    backward = ConvolutionGeometry(
        stride=geometry.input_dilation,
        padding=tuple((r - low, 0) for r, (low, _) in zip(reach, geometry.padding)),
        dilation=geometry.dilation,
        input_dilation=geometry.stride,
        groups=geometry.groups,
    )
    return _convolution(d_out, w, x_shape[1:], backward, exchanged=True)


def native_weight_gradient(
    x: Float[Array, "images channels *places"],
    d_out: Float[Array, "images outputs *positions"],
    w_shape: tuple[int, ...],
    geometry: ConvolutionGeometry,
) -> Float[Array, "outputs inputs *taps"]:
    """Compute `convolution_weight_gradient`."""
    exchanged = max(geometry.input_dilation) > 1
    windowed, plain = x, d_out
    if exchanged:
        # The sum is then over the input's positions, with a window of the output's gradient around each.
        windowed, plain = d_out, x
        geometry = ConvolutionGeometry(
            stride=geometry.input_dilation,
            padding=tuple((-low, 0) for low, _ in geometry.padding),
            dilation=tuple(-d for d in geometry.dilation),
            input_dilation=geometry.stride,
            groups=geometry.groups,
        )
    shape = (*w_shape[:2], *(1,) * (NUM_SPATIAL_AXES + 2 - len(w_shape)), *w_shape[2:])
    call = call_native("panax_convolution_by_weights", jax.ShapeDtypeStruct(shape, jnp.float32))
    return call(_spatial(windowed), _spatial(plain), **_attributes(geometry, exchanged)).reshape(w_shape)


def _convolution(
    x: Any, w: Any, out_shape: tuple[int, ...], geometry: ConvolutionGeometry, *, exchanged: bool
) -> jax.Array:
    channels, *places = out_shape
    shape = (x.shape[0], channels, *(1,) * (NUM_SPATIAL_AXES - len(places)), *places)
    call = call_native("panax_convolution", jax.ShapeDtypeStruct(shape, jnp.float32))
    return call(_spatial(x), _spatial(w), **_attributes(geometry, exchanged)).reshape(x.shape[0], *out_shape)


def _spatial(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32).reshape(*x.shape[:2], *(1,) * (NUM_SPATIAL_AXES + 2 - x.ndim), *x.shape[2:])


def _attributes(geometry: ConvolutionGeometry, exchanged: bool) -> dict[str, Any]:
    def on_all_axes(values: Any, default: int) -> np.ndarray:
        return np.array([default] * (NUM_SPATIAL_AXES - len(values)) + list(values), np.int32)

    return {
        "stride": on_all_axes(geometry.stride, 1),
        "padding": on_all_axes([low for low, _ in geometry.padding], 0),
        "dilation": on_all_axes(geometry.dilation, 1),
        "input_dilation": on_all_axes(geometry.input_dilation, 1),
        "groups": np.int32(geometry.groups),
        "exchanged": np.int32(exchanged),
    }


def _limit(case: ConvolutionCase, target: Target) -> str | None:
    if case.outputs < MIN_OUTPUTS:
        return f"a group has fewer than {MIN_OUTPUTS} output channels"
    if case.elements > MAX_ELEMENTS:
        return f"an array has more than {MAX_ELEMENTS} elements"
    if case.strided and case.input_dilated:
        return "it has both a stride and a dilated input"
    return native_limit(OWN)(case.matmul, target)


# Intel's library has no convolution for custom calls: if it is chosen for matmuls, the C files compute
# convolutions.
for _name in KERNELS:
    register(
        Kernel(
            work="convolution",
            name=_name,
            run=ConvolutionFunctions(native_convolution, native_input_gradient, native_weight_gradient),
            platforms=("cpu",),
            limit=_limit,
        )
    )
