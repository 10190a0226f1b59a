"""Matrix multiplication on CPU by the C files: kernels for "matmul", "row sums" and "wall"."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from panax.core.layout.target import Target
from panax.kernels.cpu.choice import DTYPES
from panax.kernels.cpu.native import KERNELS, OWN, call_native, unavailable_reason
from panax.kernels.product import MatmulCase
from panax.kernels.registry import Kernel, register


def native_limit(name: str) -> Callable[[MatmulCase, Target], str | None]:
    """Return the limit function of the C files with this kernel."""

    def limit(case: MatmulCase, target: Target) -> str | None:
        if case.dtype not in DTYPES:
            return f"operands must both be {' or '.join(DTYPES)}"
        if not case.local:
            return "it is a custom call, which XLA can't split over devices"
        return unavailable_reason(name, case.dtype) if case.large else "the work is too small for a custom call"

    return limit


def native_product(name: str, a: jax.Array, b: jax.Array, transposed: tuple[bool, bool]) -> jax.Array:
    """Compute the float32 matmul of two float32 or two bfloat16 matrices, each optionally transposed, by a
    kernel that is available.

    Args:
        a: (rows, summed), or (summed, rows) if transposed.
        b: (summed, columns), or (columns, summed) if transposed.
    """
    shape = (a.shape[1 if transposed[0] else 0], b.shape[0 if transposed[1] else 1])
    target = "panax_product_" + "".join("t" if each else "n" for each in transposed)
    return call_native(target, jax.ShapeDtypeStruct(shape, jnp.float32))(a, b, kernel=np.int32(KERNELS.index(name)))


def _row_sums(name: str, x: jax.Array) -> jax.Array:
    """Sum rows; XLA's sum, next to other matmuls, took up to 20 times as long."""
    if name == OWN:
        return call_native("panax_row_sums", jax.ShapeDtypeStruct(x.shape[1:], jnp.float32))(x)
    # The library multiplies with ones.
    return native_product(name, jnp.ones_like(x, shape=(1, x.shape[0])), x, (False, False))[0]


def _wall(name: str, x: jax.Array) -> jax.Array:
    return call_native("panax_wall", jax.ShapeDtypeStruct(x.shape, x.dtype), {0: 0})(x)


for _work, _run in (("matmul", native_product), ("row sums", _row_sums), ("wall", _wall)):
    for _name in KERNELS:
        _bound = functools.partial(_run, _name)
        register(Kernel(work=_work, name=_name, run=_bound, platforms=("cpu",), limit=native_limit(_name)))
