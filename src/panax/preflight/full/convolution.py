"""A check of each kernel for "convolution": the output and both gradients against their definition in float64."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ...kernels import Kernel
from ...kernels.convolution import ConvolutionCase, ConvolutionGeometry
from ...kernels.product import MatmulCase
from .comparison import local_target, run_kernel, select_supported, worst_error_share
from .parts import Figures
from .sizes import Sizes

PLACES, TAPS, STRIDE, PADDING = 19, 3, 2, 1


def check_convolution(kernel: Kernel, dtype: str, sizes: Sizes) -> Figures:
    """Check a kernel for "convolution" on images with a stride and padding, or on a depthwise convolution if it
    supports no other."""
    channels = min(sizes.width, 64)
    depthwise = bool(kernel.limit(_case(channels), local_target())) and not kernel.limit(_case(1), local_target())
    groups = channels if depthwise else 1
    inputs = channels // groups
    select_supported(kernel, [_case(inputs)], local_target())
    geometry = ConvolutionGeometry(
        stride=(STRIDE,) * 2, padding=((PADDING, PADDING),) * 2, dilation=(1, 1), input_dilation=(1, 1), groups=groups
    )
    generator = np.random.default_rng(0)
    x, w = (
        generator.normal(size=shape).astype(np.float32)
        for shape in ((2, channels, PLACES, PLACES), (channels, inputs, TAPS, TAPS))
    )
    outputs = (PLACES + 2 * PADDING - TAPS) // STRIDE + 1
    d_out = generator.normal(size=(2, channels, outputs, outputs)).astype(np.float32)

    def run(x: Any, w: Any, d_out: Any) -> tuple[Any, ...]:
        x, w, d_out = (each.astype(dtype) for each in (x, w, d_out))
        functions = kernel.run
        return (
            functions.forward(x, w, geometry),
            functions.input_gradient(d_out, w, x.shape, geometry),
            functions.weight_gradient(x, d_out, w.shape, geometry),
        )

    results, figures = run_kernel(kernel, run, (x, w, d_out), dtype)
    x, w, d_out = (_round(each, dtype) for each in (x, w, d_out))
    expected = _define(x, w, d_out, groups)
    terms = (inputs * TAPS**2, inputs * TAPS**2, d_out[:, 0].size)
    sums = _define(np.abs(x), np.abs(w), np.abs(d_out), groups)
    allowed = [2.0**-23 * (count + 2) * each for count, each in zip(terms, sums, strict=True)]
    if dtype == "bfloat16":
        # A kernel may round its result to the operands' dtype.
        allowed = [each + 2.0**-8 * np.abs(value) for each, value in zip(allowed, expected, strict=True)]
    share = worst_error_share(
        ("output", "gradient by the input", "gradient by the weights"), results, expected, allowed
    )
    return {"of the allowed error": f"{share:.0%}", "taps": f"{TAPS} x {TAPS}, stride {STRIDE}", **figures}


def _case(channels: int) -> ConvolutionCase:
    return ConvolutionCase(
        matmul=MatmulCase(dtype="float32", large=True, local=True),
        inputs=channels,
        outputs=channels,
        taps=TAPS**2,
        strided=True,
        input_dilated=False,
        elements=2 * 64 * PLACES**2,
    )


def _round(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(dtype).astype(jnp.float32), np.float64)


def _define(x: np.ndarray, w: np.ndarray, d_out: np.ndarray, groups: int) -> list[np.ndarray]:
    """Compute the three results, tap by tap."""
    padded = np.pad(x, [(0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)])
    images, channels = x.shape[:2]
    count = d_out.shape[-1]
    out, d_padded, d_w = np.zeros_like(d_out), np.zeros_like(padded), np.zeros_like(w)
    w_groups = w.reshape(groups, channels // groups, channels // groups, TAPS, TAPS)
    d_groups = d_out.reshape(images, groups, channels // groups, count, count)
    for i, j in np.ndindex(TAPS, TAPS):
        places = (..., slice(i, i + STRIDE * count - 1, STRIDE), slice(j, j + STRIDE * count - 1, STRIDE))
        window = padded[places].reshape(d_groups.shape)
        tap = w_groups[..., i, j]
        out += np.einsum("ngcyx,goc->ngoyx", window, tap).reshape(out.shape)
        d_padded[places] += np.einsum("ngoyx,goc->ngcyx", d_groups, tap).reshape(out.shape)
        d_w[:, :, i, j] = np.einsum("ngoyx,ngcyx->goc", d_groups, window).reshape(channels, -1)
    inner = slice(PADDING, -PADDING)
    return [out, d_padded[..., inner, inner], d_w]
