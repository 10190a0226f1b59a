"""Table of ATen operations and their lowerings to JAX."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

aten = torch.ops.aten

DTYPES = {
    torch.float64: jnp.float32, torch.float32: jnp.float32, torch.float16: jnp.float16, torch.bfloat16: jnp.bfloat16,
    torch.int64: jnp.int32, torch.int32: jnp.int32, torch.int16: jnp.int16, torch.int8: jnp.int8, torch.uint8: jnp.uint8,
    torch.bool: jnp.bool_, torch.complex64: jnp.complex64, torch.complex128: jnp.complex64,
    torch.uint16: jnp.uint16, torch.uint32: jnp.uint32,
}  # fmt: skip
"""Dtypes of tensors here: 64-bit values have 32 bits, as JAX computes."""


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """Shape and dtype of an operation's result, from PyTorch's own shape rules, and further facts for its
    lowering.

    Attributes:
        key: For random operations, the key to draw with.
        transposed_operands: The indices of the arguments that are transposed matrices, to be transposed back if that is
            faster.
        shared_backward: True if the result is in the backward part and several operations read it.
    """

    shape: tuple[int, ...]
    dtype: Any
    key: Callable[[], jax.Array]
    transposed_operands: frozenset[int] = frozenset()
    shared_backward: bool = False


Lowering = Callable[..., Any]
LOWERINGS: dict[Any, Lowering] = {}
"""Operation to function `(out, *args, **kwargs) -> array`, or a tuple of arrays if it returns several
tensors; an array gets PyTorch's dtype afterwards."""


def register_lowering(*operations: Any) -> Callable[[Lowering], Lowering]:
    """Register a function for these operations (overloads, or packets for all of their functional overloads)."""

    def register(function: Lowering) -> Lowering:
        for operation in operations:
            for overload in overloads(operation):
                LOWERINGS[overload] = function
        return function

    return register


def overloads(operation: Any) -> list[Any]:
    """Return a list of the overload itself; for a packet, of its overloads that write to no argument."""
    if isinstance(operation, torch._ops.OpOverload):
        return [operation]
    found = [getattr(operation, name) for name in operation.overloads()]
    return [overload for overload in found if not overload._schema.is_mutable]


def register_functions(functions: dict[str, Callable[..., Any]]) -> None:
    """Register functions that take only arrays, by the operation's name."""
    for name, function in functions.items():
        register_lowering(getattr(aten, name))(
            lambda out, *args, function=function, **kwargs: function(*args, **kwargs)
        )


def upcast(x: Any) -> Any:
    """Convert half precisions to float32."""
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


def as_dtype(dtype: torch.dtype | None, otherwise: Any) -> Any:
    return otherwise if dtype is None else DTYPES[dtype]
