"""What an optimizer keeps in 8 bits: which arrays, and in which blocks.

Blocks must be the same on every mesh, or a run would not resume bitwise on another one. No block may lie on two devices, or its
scale would have to be sent. So a block is a box of 256 numbers (`core.boxes`).
"""

import math
from typing import Any

import jax

from ..core.boxes import quant_block_shape
from ..core.errors import RecipeError
from ..core.layout import current_layout
from ..core.logical import is_copies
from ..core.protocols import Axes
from ..kernels.quantised import DYNAMIC, DYNAMIC_UNSIGNED, QuantizedArray

LEAST, BLOCK = 4096, 256
"""Own arrays of fewer numbers stay as they are, and a block's numbers: those of torchao's AdamW8bit."""


def block_of(shape: tuple[int, ...], axes: Axes) -> tuple[int, ...] | None:
    """A block's size along each dimension of what is kept; None for what stays as it is.

    >>> block_of((12, 512, 384), ("layer", "embed", "kv_latent")), block_of((12, 4096, 14336), ("layer", "embed", "ffn"))
    ((1, 2, 128), (1, 8, 32))
    >>> block_of((512, 256), ("embed", "kv_latent")), block_of((12, 64), ("layer", "norm"))
    ((1, 256), None)
    """
    own = [dim for dim, axis in enumerate(axes) if not is_copies(axis)]
    if math.prod(shape[dim] for dim in own) < LEAST:
        return None
    box = quant_block_shape(shape, axes, own, BLOCK)
    return box if math.prod(box) == BLOCK else None


def zeros_in_codes(shape: tuple[int, ...], axes: Axes, signed: bool, dtype: str) -> QuantizedArray | None:
    """An array of zeros in 8 bits; None for one that stays as it is.

    Args:
        signed: It may be negative.
        dtype: What it would be in otherwise.
    """
    block = block_of(shape, axes)
    return None if block is None else QuantizedArray.zeros(shape, DYNAMIC if signed else DYNAMIC_UNSIGNED, block, dtype)


def decode_state(kept: Any, dtype: Any) -> jax.Array:
    """What is kept, in codes or not, in the type that is computed in."""
    return kept.dequantize(dtype) if isinstance(kept, QuantizedArray) else kept.astype(dtype)


def axes_of_parts(kept: Any, axes: Axes) -> Any:
    """The logical axes of each leaf of what is kept: codes and scales both have those of the array."""
    return jax.tree.map(lambda _: axes, kept)


def check_blocks(name: str, kept: Any, axes: Axes) -> None:
    """See that no block is split, in the layout that is being traced for.

    Raises:
        RecipeError: One would be.
    """
    layout = current_layout()
    if layout is None or not isinstance(kept, QuantizedArray):
        return
    codes, scales = (layout.storage(axes, part.shape) for part in (kept.codes, kept.scales))
    for dim, (ours, theirs) in enumerate(zip(codes, scales)):
        if ours != theirs:
            raise RecipeError(
                f'optimizer.moments="int8": {name} rests split over {"·".join(ours)} along {axes[dim]}={kept.shape[dim]}, which '
                f"would split its blocks of {kept.block[dim]} there; split it over fewer devices, or set optimizer.moments to "
                f'"bfloat16"'
            )
