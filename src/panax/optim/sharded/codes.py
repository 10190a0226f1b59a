"""Selection of optimizer-state arrays to store in 8 bits, and their quantization blocks.

Blocks must be the same on every mesh, so that a run resumes bitwise on another one, and no block may span two
devices, since its scale would have to be communicated. A block therefore has 256 elements in a shape that
sharding does not split (`core.layout.quant_blocks`).
"""

import math
from typing import Any

import jax

from ...core.errors import RecipeError
from ...core.layout.layout import current_layout
from ...core.layout.quant_blocks import quant_block_shape
from ...core.params.logical import is_stack_axis
from ...core.protocols import Axes
from ...kernels.quantized import DYNAMIC, DYNAMIC_UNSIGNED, QuantizedArray

LEAST, BLOCK = 4096, 256
"""Minimum number of elements of an array to quantize, and elements per block: those of torchao's
AdamW8bit."""


def block_shape(shape: tuple[int, ...], axes: Axes) -> tuple[int, ...] | None:
    """Return the block's size along each dimension of a state array; None if it is not quantized.

    >>> block_shape((12, 512, 384), ("layer", "embed", "kv_latent")), block_shape((12, 4096, 14336), ("layer", "embed", "ffn"))
    ((1, 2, 128), (1, 8, 32))
    >>> block_shape((512, 256), ("embed", "kv_latent")), block_shape((12, 64), ("layer", "norm"))
    ((1, 256), None)
    """
    array_dims = [dim for dim, axis in enumerate(axes) if not is_stack_axis(axis)]
    if math.prod(shape[dim] for dim in array_dims) < LEAST:
        return None
    box = quant_block_shape(shape, axes, array_dims, BLOCK)
    return box if math.prod(box) == BLOCK else None


def quantized_zeros(shape: tuple[int, ...], axes: Axes, signed: bool, dtype: str) -> QuantizedArray | None:
    """Create an 8-bit array of zeros; None if an array of this shape is not quantized.

    Args:
        signed: True if values may be negative.
        dtype: Dtype of the decoded values.
    """
    block = block_shape(shape, axes)
    return None if block is None else QuantizedArray.zeros(shape, DYNAMIC if signed else DYNAMIC_UNSIGNED, block, dtype)


def decode_state(stored: Any, dtype: Any) -> jax.Array:
    """Convert a state array, quantized or not, to the compute dtype."""
    return stored.dequantize(dtype) if isinstance(stored, QuantizedArray) else stored.astype(dtype)


def state_leaf_axes(stored: Any, axes: Axes) -> Any:
    """Return the logical axes of each leaf of a state array: codes and scales both have those of the
    array."""
    return jax.tree.map(lambda _: axes, stored)


def check_blocks(name: str, stored: Any, axes: Axes) -> None:
    """Check that the current layout splits no quantization block.

    Raises:
        RecipeError: A block would be split.
    """
    layout = current_layout()
    if layout is None or not isinstance(stored, QuantizedArray):
        return
    codes, scales = (layout.storage(axes, part.shape) for part in (stored.codes, stored.scales))
    for dim, (ours, theirs) in enumerate(zip(codes, scales)):
        if ours != theirs:
            raise RecipeError(
                f'optimizer.moments="int8": {name} is sharded over {"·".join(ours)} along '
                f"{axes[dim]}={stored.shape[dim]}, which "
                f"would split its blocks of {stored.block[dim]} there; shard it over fewer devices, or set optimizer.moments to "
                f'"bfloat16"'
            )
