"""The table of ATen operations and what each is in JAX."""

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
"""What a tensor's dtype is here: 64-bit numbers have 32 bits, as JAX computes."""


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """What an operation returns, from PyTorch's own shape rules, and what else its lowering may ask.

    Attributes:
        key: For random ones, the key to draw with.
        turned: The places of those arguments that are transpositions of matrices, to be turned back where that is faster.
        shared_backward: Whether it is of the backward part and read by several others.
    """

    shape: tuple[int, ...]
    dtype: Any
    key: Callable[[], jax.Array]
    transposed_operands: frozenset[int] = frozenset()
    shared_backward: bool = False


Lowering = Callable[..., Any]
LOWERINGS: dict[Any, Lowering] = {}
"""Operation to function `(out, *args, **kwargs) -> array`, or a tuple of arrays where it returns several tensors; an array gets
PyTorch's dtype afterwards."""


def register_lowering(*operations: Any) -> Callable[[Lowering], Lowering]:
    """Register a function for these operations (overloads, or packets for all of their functional overloads)."""

    def register(function: Lowering) -> Lowering:
        for operation in operations:
            for overload in overloads(operation):
                LOWERINGS[overload] = function
        return function

    return register


def overloads(operation: Any) -> list[Any]:
    """An overload as it is; those of a packet that write to no argument."""
    if isinstance(operation, torch._ops.OpOverload):
        return [operation]
    found = [getattr(operation, name) for name in operation.overloads()]
    return [overload for overload in found if not overload._schema.is_mutable]


def register_functions(functions: dict[str, Callable[..., Any]]) -> None:
    """Register functions of arrays alone by the operation's name."""
    for name, function in functions.items():
        register_lowering(getattr(aten, name))(
            lambda out, *args, function=function, **kwargs: function(*args, **kwargs)
        )


def upcast(x: Any) -> Any:
    """In float32, where lower precision would be too low."""
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


def as_dtype(dtype: torch.dtype | None, otherwise: Any) -> Any:
    return otherwise if dtype is None else DTYPES[dtype]
