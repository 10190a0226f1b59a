"""Codes, scales and residual in one pass, for GPUs in Pallas (Triton): a program holds whole rows in
registers.

Compiled ahead of time for the H100 and interpreted on the CPU; not yet timed on a GPU.
"""

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Float32

from ..varying_axes import output_struct, vary_alike
from .array import TINY
from .formats import Float8, Format, Linear

BLOCK_ELEMENTS = 4096
"""Number of values that a program holds at once, of each operand."""


def gpu_quantize_with_residual(
    x: Float32[Array, "row block"], residual: Float32[Array, "row block"], format: Format, *, interpret: bool = False
) -> tuple[Array, Float32[Array, " row"], Float32[Array, "row block"]]:
    """Compute (codes, scales, residual) of `quantize_with_residual`.

    Args:
        interpret: Run the kernel as ordinary JAX operations on any backend, slowly.
    """
    rows, block = x.shape
    packed = format.packed
    # Values with codes in one byte are neighbors.
    x, residual = vary_alike(*(each.reshape(rows, block // packed, packed) for each in (x, residual)))
    size = min(max(BLOCK_ELEMENTS // block, 1), pl.next_power_of_2(rows))

    def kernel(x_ref, residual_ref, codes_ref, scales_ref, new_residual_ref):
        rows_of_program = pl.ds(pl.program_id(0) * size, size)
        mask = (pl.program_id(0) * size + jnp.arange(size)) < rows
        wide = jnp.broadcast_to(mask[:, None], (size, block // packed))

        def read(ref, part):
            values = plt.load(ref.at[rows_of_program, :, pl.ds(part, 1)], mask=wide[:, :, None], other=0.0)
            return values.reshape(wide.shape)

        parts = [read(x_ref, part) + read(residual_ref, part) for part in range(packed)]
        largest, bad = jnp.zeros((size,), jnp.float32), jnp.zeros((size,), jnp.int32)
        for each in parts:
            largest = jnp.maximum(largest, jnp.max(jnp.abs(each), axis=1))
            # Checked for each value: a maximum ignores NaN.
            bad += jnp.sum((~(jnp.abs(each) < jnp.inf)).astype(jnp.int32), axis=1)
        scale = largest * (1 / format.largest)
        scale = jnp.where(scale >= TINY, scale, 0.0)
        fits = (scale > 0) & (bad == 0)
        # Divided as in the definition, not multiplied with an inverse, which would round twice.
        divisor, stored_scale = jnp.where(fits, scale, 1.0)[:, None], jnp.where(bad > 0, jnp.nan, scale)
        packed_codes = jnp.zeros((size, block // packed), jnp.int32)
        for place, each in enumerate(parts):
            codes, value = _coded(jnp.where(fits[:, None], each / divisor, 0.0), format)
            error = (each - value * stored_scale[:, None])[:, :, None]
            plt.store(new_residual_ref.at[rows_of_program, :, pl.ds(place, 1)], error, mask=wide[:, :, None])
            packed_codes = codes if packed == 1 else packed_codes | ((codes.astype(jnp.int32) & 0xF) << (4 * place))
        plt.store(codes_ref.at[rows_of_program, :], packed_codes.astype(format.dtype), mask=wide)
        plt.store(scales_ref.at[rows_of_program], stored_scale, mask=mask)

    codes, scales, new_residual = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, size),),
        out_shape=(
            output_struct((rows, block // packed), format.dtype, x),
            output_struct((rows,), jnp.float32, x),
            output_struct(x.shape, jnp.float32, x),
        ),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="panax_codes_and_rest",
    )(x, residual)
    return codes, scales, new_residual.reshape(rows, block)


def _coded(x: Array, format: Format) -> tuple[Array, Array]:
    """Return (codes, their values) of scaled values."""
    if isinstance(format, Float8):
        codes = x.astype(format.dtype)
        return codes, codes.astype(jnp.float32)
    assert isinstance(format, Linear)
    # To nearest, ties to even, which Triton has no operation for; the difference to the next lower whole
    # number is exact.
    below = jnp.floor(x)
    above, odd = x - below, below - 2 * jnp.floor(below * 0.5)
    up = (above > 0.5) | ((above == 0.5) & (odd == 1))
    rounded = jnp.clip(below + up.astype(jnp.float32), -format.largest, format.largest)
    return rounded.astype(jnp.int8), rounded
