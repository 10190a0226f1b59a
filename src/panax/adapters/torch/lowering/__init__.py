"""ATen operations in JAX, some 300 of them; to add one, write a function in the file of its kind, registered
by `register_lowering`."""

import functools
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table

from . import (
    attention,
    convolution,
    grouped,
    indexing,
    normalization,
    pointwise,
    pooling,
    products,
    randomness,
    reductions,
    sequences,
    shapes,
)
from .functions import ReplacementMode
from .grouped import TRACING_REPLACEMENTS
from .registry import DTYPES, LOWERINGS, OutputSpec

_FILES = (
    attention, convolution, grouped, indexing, normalization, pointwise, pooling, products, randomness, reductions, sequences,
    shapes,
)  # fmt: skip


def decompositions() -> dict[Any, Any]:
    """Return PyTorch's own decompositions of operations without a lowering."""
    known = {**decomposition_table, **_core_decompositions(tuple(torch._C._dispatch_get_all_op_names()))}
    return {operation: function for operation, function in known.items() if operation not in LOWERINGS}


@functools.lru_cache(maxsize=1)
def _core_decompositions(registered: tuple[str, ...]) -> dict[Any, Any]:
    """Return the decompositions to core operations, which PyTorch collects from all registered operations."""
    return dict(core_aten_decompositions())


__all__ = ["DTYPES", "LOWERINGS", "TRACING_REPLACEMENTS", "OutputSpec", "ReplacementMode", "decompositions"]
