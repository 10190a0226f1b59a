"""Quantization of a sum of two arrays with the rounding error: for sending a gradient with error feedback.

XLA needs two passes on a GPU: one adds and finds the largest of each block, and the next reads the sum again.
That is 21 bytes per value for 8-bit codes. In one pass it is 13: 8 read, 4 for the residual, 1 for a
code.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt32

from panax.core.layout.layout import current_target
from panax.core.layout.target import Target

from ..registry import Kernel, choose, register
from .array import QuantizedArray, quantize
from .formats import Float8, Format, Linear
from .residual_gpu import gpu_quantize_with_residual

WORK = "codes and rest"


@dataclasses.dataclass(frozen=True)
class ResidualCase:
    """Static case of the choice of a kernel.

    Attributes:
        block: Number of values with one scale.
        stochastic: True for stochastic rounding.
    """

    format: Format
    block: int
    stochastic: bool = False


def quantize_with_residual(
    x: Float32[Array, "*rows block"],
    residual: Float32[Array, "*rows block"],
    format: Format,
    bits: UInt32[Array, "*rows block"] | None = None,
) -> tuple[QuantizedArray, Float32[Array, "*rows block"]]:
    """Compute `quantize(x + residual)`, with each row a block; and the new residual: `x + residual` minus the
    dequantized array.

    Args:
        bits: As in `quantize`.

    >>> from panax.kernels.quantized import INT8
    >>> quantized, residual = quantize_with_residual(jnp.array([[1.0, 0.25]]), jnp.array([[0.0, 0.01]]), INT8)
    >>> quantized.codes.tolist(), round(float(residual[0, 1]), 5)
    ([[127, 33]], 0.00016)
    """
    case = ResidualCase(format, x.shape[-1], bits is not None)
    return choose(WORK, case, current_target()).kernel.run(x, residual, format, bits)


def reference(
    x: Float32[Array, "*rows block"],
    residual: Float32[Array, "*rows block"],
    format: Format,
    bits: UInt32[Array, "*rows block"] | None = None,
) -> tuple[QuantizedArray, Float32[Array, "*rows block"]]:
    """Compute `quantize_with_residual` by its definition."""
    total = x + residual
    quantized = quantize(total, format, x.shape[-1], bits)
    return quantized, total - quantized.dequantize(jnp.float32)


def _pallas(
    x: Float32[Array, "*rows block"],
    residual: Float32[Array, "*rows block"],
    format: Format,
    bits: UInt32[Array, "*rows block"] | None = None,
) -> tuple[QuantizedArray, Float32[Array, "*rows block"]]:
    *front, block = x.shape
    codes, scales, new_residual = gpu_quantize_with_residual(x.reshape(-1, block), residual.reshape(-1, block), format)
    quantized = QuantizedArray(
        codes.reshape(*front, -1), scales.reshape(*front, 1), format, (block,), jnp.dtype(jnp.float32)
    )
    return quantized, new_residual.reshape(x.shape)


def _limit(case: ResidualCase, target: Target) -> str | None:
    if case.stochastic:
        return "it rounds to the nearest"
    if not isinstance(case.format, Linear | Float8):
        return f"it has no codes of {case.format}"
    if case.block & (case.block - 1) or not 32 <= case.block <= 1024:
        return f"a block has {case.block} numbers, and a program takes powers of two from 32 to 1,024"
    return None


register(Kernel(work=WORK, name="xla", run=reference))
register(Kernel(work=WORK, name="pallas", run=_pallas, platforms=("gpu",), rank=10, limit=_limit))
