"""Matrix multiplication on CPU by the C files, and whether work is handed to them."""

import jax
import jax.numpy as jnp
import numpy as np

from panax.core.layout import arrays_are_local
from panax.kernels.cpu.choice import Work, kernel_for
from panax.kernels.cpu.native import KERNELS, native

LEAST_PRODUCTS = 2**22
"""Multiplications from which work is worth a custom call."""


def handed_over(work: Work, multiplications: int, *operands: jax.Array) -> str | None:
    """The kernel that work on CPU is handed to, where it is large enough and its arrays are local; None for XLA."""
    # A custom call says nothing of the mesh axes that its result varies over, where a shard_map checks that.
    checked = any(jax.typeof(x).manual_axis_type.varying for x in operands)
    local = not checked and arrays_are_local()
    return kernel_for(work, *(x.dtype for x in operands)) if local and multiplications >= LEAST_PRODUCTS else None


def native_product(a: jax.Array, b: jax.Array, transposed: tuple[bool, bool], kernel: str) -> jax.Array:
    """The float32 product of two float32 or two bfloat16 matrices, either taken transposed, by a kernel that is not missing.

    Args:
        a: (rows, summed), or (summed, rows) where transposed.
        b: (summed, columns), or (columns, summed) where transposed.
    """
    shape = (a.shape[1 if transposed[0] else 0], b.shape[0 if transposed[1] else 1])
    target = "panax_product_" + "".join("t" if each else "n" for each in transposed)
    return native(target, jax.ShapeDtypeStruct(shape, jnp.float32))(a, b, kernel=np.int32(KERNELS.index(kernel)))
