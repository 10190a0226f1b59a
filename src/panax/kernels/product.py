"""One product of two arrays: where its accumulation and, where one pays, its orientation are decided."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from panax.core.layout import current_target
from panax.kernels.cpu.native import native
from panax.kernels.cpu.products import handed_over, native_product


def product(equation: str, a: jax.Array, b: jax.Array, out_dtype: Any) -> jax.Array:
    """`einsum(equation, a, b)`, accumulated in float32.

    On CPU a product whose summed letters lie together in each operand is made of two matrices, and handed to the kernel that is
    chosen for its dtype (`cpu/timing.py`). XLA's own is, in float32, also made of matrices: of operands with more dimensions
    it copies one transposed, and fuses whatever made it into that copy, to be computed again. In bfloat16 it is left as it is:
    there the copy is what lets it use the matrix units of Intel's processors, which take a left operand by its rows only.

    Args:
        equation: Single letters, as `jnp.einsum` takes them.
        out_dtype: What the float32 sums are rounded to.

    >>> product("abc,cd->abd", jnp.ones((2, 3, 4)), jnp.ones((4, 5)), jnp.float32).shape
    (2, 3, 5)
    """
    flat = current_target().traits.flat_matmuls
    matrices = _matrices(equation) if flat and a.dtype == b.dtype and a.dtype in (jnp.float32, jnp.bfloat16) else None
    if matrices is None:
        return _einsum(equation, a, b, out_dtype)
    left, right = (b, a) if matrices.swapped else (a, b)
    shape = (*matrices.left.rows(left), *matrices.right.rows(right))
    left, right = matrices.left.matrix(left), matrices.right.matrix(right)
    kernel = handed_over("product", left.size * right.shape[1 - matrices.right.summed_dim], left, right)
    if kernel is not None:
        out = native_product(left, right, (matrices.left.first, not matrices.right.first), kernel)
    elif a.dtype == jnp.bfloat16:
        return _einsum(equation, a, b, out_dtype)
    else:
        summed = ((matrices.left.summed_dim,), (matrices.right.summed_dim,))
        out = lax.dot_general(left, right, (summed, ((), ())), preferred_element_type=jnp.float32)
    return out.astype(out_dtype).reshape(shape)


def sum_of_rows(x: jax.Array) -> jax.Array:
    """The sum over the rows of a matrix, in float32 or, of what is wider, in its own type.

    On CPU it is a product with ones where a kernel was chosen for that: XLA's own sum, beside other products, took up to 20
    times as long.

    >>> sum_of_rows(jnp.ones((3, 2), jnp.bfloat16)).tolist()
    [3.0, 3.0]
    """
    kernel = handed_over("row_sums", x.size * 8, x) if current_target().platform == "cpu" else None
    if kernel is not None:
        return native_product(jnp.ones_like(x, shape=(1, x.shape[0])), x, (False, False), kernel)[0]
    return x.sum(axis=0, dtype=x.dtype if x.dtype.itemsize > 4 else jnp.float32)


def walled(x: jax.Array) -> jax.Array:
    """`x`; on CPU, where products of its dtype are custom calls, behind a wall that XLA fuses nothing across.

    XLA takes the barriers of a program down before it fuses. A sum that is an operand of such products and of the next sum is
    then computed again for each, from all that any sum before it has added.
    """
    if current_target().platform != "cpu" or handed_over("product", x.size * 8, x) is None:
        return x
    return native("panax_wall", jax.ShapeDtypeStruct(x.shape, x.dtype), {0: 0})(x)


def _einsum(equation: str, a: jax.Array, b: jax.Array, out_dtype: Any) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32).astype(out_dtype)


class _Operand(NamedTuple):
    """How an operand is a matrix: its `summed` dimensions are its first ones or its last ones."""

    summed: int
    first: bool

    @property
    def summed_dim(self) -> int:
        return 0 if self.first else 1

    def rows(self, x: jax.Array) -> tuple[int, ...]:
        return x.shape[self.summed :] if self.first else x.shape[: x.ndim - self.summed]

    def matrix(self, x: jax.Array) -> jax.Array:
        rows = math.prod(self.rows(x))
        return x.reshape((-1, rows) if self.first else (rows, -1))


class _Matrices(NamedTuple):
    left: _Operand
    right: _Operand
    swapped: bool


@functools.lru_cache(maxsize=1024)
def _matrices(equation: str) -> _Matrices | None:
    """How an equation is a product of two matrices without moving anything; None where it is not."""
    operands, out = equation.split("->")
    a, b = operands.split(",")
    summed = "".join(letter for letter in a if letter not in out)
    both = set(a) & set(b)
    if not summed or both != set(summed) or len(set(a)) < len(a) or len(set(b)) < len(b):
        return None
    parts = []
    for letters in (a, b):
        if letters.startswith(summed):
            parts.append((_Operand(len(summed), first=True), letters[len(summed) :]))
        elif letters.endswith(summed):
            parts.append((_Operand(len(summed), first=False), letters[: -len(summed)]))
        else:
            return None
    (left, left_rows), (right, right_rows) = parts
    if out == left_rows + right_rows:
        return _Matrices(left, right, swapped=False)
    if out == right_rows + left_rows:
        return _Matrices(right, left, swapped=True)
    return None
