"""ATen operations as JAX. Some 300 of them; a further one is a function in the file of its kind, registered by `lowers`."""

from typing import Any

from torch._decomp import core_aten_decompositions

from . import (
    attention,
    convolution,
    grouped,
    indexing,
    normalisation,
    pointwise,
    pooling,
    products,
    randomness,
    reductions,
    sequences,
    shapes,
)
from .grouped import WHILE_TRACING
from .registry import DTYPES, LOWERINGS, Out

_FILES = (
    attention, convolution, grouped, indexing, normalisation, pointwise, pooling, products, randomness, reductions, sequences,
    shapes,
)  # fmt: skip


def decompositions() -> dict[Any, Any]:
    """PyTorch's own decompositions of what has no lowering."""
    return {
        operation: function for operation, function in core_aten_decompositions().items() if operation not in LOWERINGS
    }


__all__ = ["DTYPES", "LOWERINGS", "WHILE_TRACING", "Out", "decompositions"]
