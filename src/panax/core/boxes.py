"""Boxes of neighbouring numbers that lie on one device on every usual mesh: what numbers in few bits share a scale by.

A scale for the next 256 numbers in storage would be another one on another mesh, and the same run would round otherwise there. So
the sides of a box are chosen by the array's logical shape alone, and leave each dimension enough boxes to be split over devices.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from .layout import Layout
from .logical import is_copies, traits_of
from .protocols import Axes

LEAST, BOX, SMALLEST = 4096, 256, 16
"""What travels as codes: arrays of at least so many numbers, in boxes of at most and at least so many."""


class QuantBlocks(NamedTuple):
    """How an array is cut in boxes.

    Attributes:
        whole: The array's shape, on all devices.
        box: The sides of a box.
        sides: Those on this mesh: smaller where it splits a dimension further than boxes leave room for, so that it rounds
            otherwise than other meshes.
    """

    whole: tuple[int, ...]
    box: tuple[int, ...]
    sides: tuple[int, ...]


def quant_blocks(shape: Sequence[int], axes: Axes, layout: Layout) -> QuantBlocks | None:
    """The boxes of what travels as codes; None for an array that is too small, or too odd in shape.

    Args:
        shape: Of a device's shard.
        axes: The array's logical axes.
    """
    parts = [math.prod(layout.sizes[axis] for axis in dim) for dim in layout.storage(axes)]
    whole = tuple(size * n for size, n in zip(shape, parts))
    own = [dim for dim, axis in enumerate(axes) if not is_copies(axis)]
    if math.prod(whole[dim] for dim in own) < LEAST:
        return None
    box = quant_block_shape(whole, axes, own, BOX)
    sides = tuple(math.gcd(side, size) for side, size in zip(box, shape))
    return None if math.prod(sides) < SMALLEST else QuantBlocks(whole, box, sides)


def quant_block_shape(shape: Sequence[int], axes: Axes, own: Sequence[int], most: int) -> tuple[int, ...]:
    """The sides of a box of at most `most` numbers, a power of two.

    It takes powers of two from dimensions that rest whole, the last one first, and then in turn from those that rest split: along
    one that is split at rest alone (such as embed) at least 8 boxes are left, along one that is computed in parts 2.

    Args:
        own: The dimensions of one array, where `shape` is that of a stack of them.

    >>> quant_block_shape((12, 512, 384), ("layer", "embed", "kv_latent"), (1, 2), 256)
    (1, 2, 128)
    >>> quant_block_shape((12, 4096, 14336), ("layer", "embed", "ffn"), (1, 2), 256)
    (1, 8, 32)
    >>> quant_block_shape((96, 272), ("embed", "ffn"), (0, 1), 256)
    (4, 8)
    """
    left = dict.fromkeys(own, 0)
    for dim in own:
        while shape[dim] % 2 ** (left[dim] + 1) == 0:
            left[dim] += 1
    whole = [dim for dim in reversed(own) if not traits_of(axes[dim]).storage]
    for dim in own:
        if dim not in whole:
            traits = traits_of(axes[dim])
            left[dim] -= 1 if traits.storage == traits.compute else 3
    box = [1] * len(shape)
    for _ in range(most.bit_length() - 1):
        free = [dim for dim in whole if left[dim] > 0]
        taken = free[0] if free else max(own, key=lambda dim: (left[dim], dim), default=None)
        if taken is None or left[taken] <= 0:
            break
        left[taken] -= 1
        box[taken] *= 2
    return tuple(box)
