"""Matmuls of two arrays, and sums of rows: the choice of their kernel and orientation."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from panax.core.layout.layout import arrays_are_local, current_target
from panax.core.layout.target import Target
from panax.kernels.cpu.choice import XLA, timed_kernel
from panax.kernels.registry import NAMED, Kernel, KernelChoice, choose, is_exact, log_choice, refuse_exact, register

MIN_PRODUCTS = 2**22
"""Minimum number of multiplications for a custom call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulCase:
    """Properties of work based on matrix multiplications that the choice of a kernel depends on.

    Attributes:
        dtype: The name of the operands' dtype; empty if they differ.
        large: True if it is worth a custom call.
        local: True if each array is on one device, and its variation over mesh axes is not checked: a custom
            call does not propagate it.
    """

    dtype: str
    large: bool
    local: bool

    @classmethod
    def of(cls, multiplications: int, *operands: jax.Array) -> "MatmulCase":
        names = {x.dtype.name for x in operands}
        return cls(
            dtype=names.pop() if len(names) == 1 else "",
            large=multiplications >= MIN_PRODUCTS,
            local=is_local(*operands),
        )


def is_local(*operands: jax.Array) -> bool:
    """Return True if each array is on one device, and its variation over mesh axes is not checked: a custom
    call does not propagate it."""
    return arrays_are_local() and not any(jax.typeof(x).manual_axis_type.varying for x in operands)


def product(equation: str, a: jax.Array, b: jax.Array, out_dtype: Any) -> jax.Array:
    """Compute `einsum(equation, a, b)`, accumulated in float32.

    If its summed letters are adjacent in each operand, it is a matmul of two matrices, and another kernel
    than XLA may be chosen for it. On a target with the trait `flat_matmuls`, float32 operands are flattened
    to matrices for XLA, too: with more dimensions XLA on CPU copies an operand transposed, and fuses its
    producer into that copy, to be recomputed. In bfloat16 they are not flattened: there the copy is needed
    for the matrix units of Intel's processors, which read a left operand only by its rows.

    Args:
        equation: Single letters, as for `jnp.einsum`.
        out_dtype: Dtype that the float32 sums are rounded to.

    >>> product("abc,cd->abd", jnp.ones((2, 3, 4)), jnp.ones((4, 5)), jnp.float32).shape
    (2, 3, 5)
    """
    matrices = _matrices(equation) if a.dtype == b.dtype and a.dtype in (jnp.float32, jnp.bfloat16) else None
    if matrices is None:
        refuse_exact(f"{equation} of {a.dtype} and {b.dtype}, no product of two matrices of float32 or bfloat16")
        return _einsum(equation, a, b, out_dtype)
    left, right = (b, a) if matrices.swapped else (a, b)
    rows, columns = matrices.left.rows(left), matrices.right.rows(right)
    kernel = kernel_for("matmul", left.size * math.prod(columns), left, right)
    if kernel is None and not (a.dtype == jnp.float32 and current_target().traits.flat_matmuls):
        return _einsum(equation, a, b, out_dtype)
    left, right = matrices.left.matrix(left), matrices.right.matrix(right)
    if kernel is not None:
        out = kernel.run(left, right, (matrices.left.first, not matrices.right.first))
    else:
        summed = ((matrices.left.summed_dim,), (matrices.right.summed_dim,))
        out = lax.dot_general(left, right, (summed, ((), ())), preferred_element_type=jnp.float32)
    return materialize(out.astype(out_dtype)).reshape(*rows, *columns)


def sum_rows(x: jax.Array) -> jax.Array:
    """Sum over the rows of a matrix, in float32, or in its dtype if that is wider.

    >>> sum_rows(jnp.ones((3, 2), jnp.bfloat16)).tolist()
    [3.0, 3.0]
    """
    kernel = kernel_for("row sums", x.size * 8, x)
    return x.sum(axis=0, dtype=x.dtype if x.dtype.itemsize > 4 else jnp.float32) if kernel is None else kernel.run(x)


def fusion_barrier(x: jax.Array) -> jax.Array:
    """Return `x`; if matmuls of its dtype are custom calls, behind a barrier that XLA does not fuse across.

    XLA on CPU removes a program's optimization barriers before fusion. A sum that is an operand of such
    matmuls and of the next sum is then recomputed for each, from all terms of all earlier sums.
    """
    kernel = kernel_for("wall", x.size * 8, x)
    return x if kernel is None else kernel.run(x)


def materialize(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return `x`; among exact kernels, as a value that nothing is fused across, so that XLA computes it by the same
    operations, and rounds it, in every program."""
    return choose("materialize", MatmulCase.of(x.size, x), current_target()).kernel.run(x)


def sum_few(x: Float[Array, "*shape"], axis: int, *, keepdims: bool = False) -> Float[Array, "*rest"]:
    """Sum along a short axis; with exact kernels, term by term, in order."""
    if not is_exact():
        return x.sum(axis=axis, keepdims=keepdims)
    first, *others = (lax.index_in_dim(x, index, axis, keepdims=keepdims) for index in range(x.shape[axis]))
    return materialize(functools.reduce(lax.add, others, first))


def kernel_for(work: str, multiplications: int, *operands: jax.Array) -> Kernel | None:
    """Choose a kernel other than XLA's for work based on matrix multiplications; None for XLA's.

    A named kernel is used for the cases that it supports, and others for the remaining ones.
    """
    case, target = MatmulCase.of(multiplications, *operands), current_target()
    choice = choose(work, case, target, timed=timed_kernel(work, case.dtype), yields=True)
    if choice.reason == NAMED and work != "wall":
        log_choice(choice, target)
    return None if choice.name == XLA else choice.kernel


def choose_timed(work: str, case: Any, dtype: str, target: Target) -> KernelChoice:
    """Choose a kernel like `choose`, given the timing result for the work in this dtype."""
    return choose(work, case, target, timed=timed_kernel(work, dtype))


register(Kernel(work="materialize", name=XLA, run=lambda x: x, rank=10))
for _work in ("matmul", "row sums", "wall"):
    register(Kernel(work=_work, name=XLA, run=None, rank=10))


def _einsum(equation: str, a: jax.Array, b: jax.Array, out_dtype: Any) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32).astype(out_dtype)


class _Operand(NamedTuple):
    """View of an operand as a matrix: its `summed` dimensions are its first ones or its last ones."""

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
    """Return how an equation is a matmul of two matrices without moving data; None if it is not."""
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
