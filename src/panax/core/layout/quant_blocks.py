"""Quantization blocks: neighboring elements that share a scale, stored on one device on every usual mesh.

If a scale covered the next 256 elements in storage order, it would cover other elements on another mesh, and
the same run would round differently on it. Block shapes therefore depend only on the array's logical shape,
and leave each dimension enough blocks to be sharded over devices.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..params.logical import is_stack_axis, lookup_axis
from ..protocols import Axes
from .layout import Layout

LEAST, BOX, SMALLEST = 4096, 256, 16
"""Minimum number of elements of an array that is quantized, and maximum and minimum number of elements of a
block.
"""


class QuantBlocks(NamedTuple):
    """Partition of an array into quantization blocks.

    Attributes:
        global_shape: Shape of the global array.
        block_shape: Shape of a block.
        local_block_shape: Shape of a block on this mesh. It is smaller if the mesh shards a dimension into more parts
            than blocks allow for, so rounding then differs from other meshes.
    """

    global_shape: tuple[int, ...]
    block_shape: tuple[int, ...]
    local_block_shape: tuple[int, ...]


def quant_blocks(shape: Sequence[int], axes: Axes, layout: Layout) -> QuantBlocks | None:
    """Return the quantization blocks of an array; None if it is too small or its dimensions have no suitable
    divisors.

    Args:
        shape: Shape of a device's shard.
        axes: The array's logical axes.
    """
    parts = [math.prod(layout.sizes[axis] for axis in dim) for dim in layout.storage(axes)]
    whole = tuple(size * n for size, n in zip(shape, parts))
    own = [dim for dim, axis in enumerate(axes) if not is_stack_axis(axis)]
    if math.prod(whole[dim] for dim in own) < LEAST:
        return None
    box = quant_block_shape(whole, axes, own, BOX)
    sides = tuple(math.gcd(side, size) for side, size in zip(box, shape))
    return None if math.prod(sides) < SMALLEST else QuantBlocks(whole, box, sides)


def quant_block_shape(
    shape: Sequence[int], axes: Axes, array_dims: Sequence[int], max_elements: int
) -> tuple[int, ...]:
    """Return the shape of a block of at most `max_elements` elements, a power of two.

    Powers of two are taken from unsharded dimensions, the last one first, and then in turn from sharded ones.
    A dimension that is sharded only in storage (such as embed) has at least 8 blocks, one that is also
    sharded in computation 2.

    Args:
        array_dims: Dimensions of a single array, if `shape` is that of a stack of arrays.

    >>> quant_block_shape((12, 512, 384), ("layer", "embed", "kv_latent"), (1, 2), 256)
    (1, 2, 128)
    >>> quant_block_shape((12, 4096, 14336), ("layer", "embed", "ffn"), (1, 2), 256)
    (1, 8, 32)
    >>> quant_block_shape((96, 272), ("embed", "ffn"), (0, 1), 256)
    (4, 8)
    """
    halvings = dict.fromkeys(array_dims, 0)
    for dim in array_dims:
        while shape[dim] % 2 ** (halvings[dim] + 1) == 0:
            halvings[dim] += 1
    unsharded_dims = [dim for dim in reversed(array_dims) if not lookup_axis(axes[dim]).storage]
    for dim in array_dims:
        if dim not in unsharded_dims:
            traits = lookup_axis(axes[dim])
            halvings[dim] -= 1 if traits.storage == traits.compute else 3
    box = [1] * len(shape)
    for _ in range(max_elements.bit_length() - 1):
        free = [dim for dim in unsharded_dims if halvings[dim] > 0]
        chosen_dim = free[0] if free else max(array_dims, key=lambda dim: (halvings[dim], dim), default=None)
        if chosen_dim is None or halvings[chosen_dim] <= 0:
            break
        halvings[chosen_dim] -= 1
        box[chosen_dim] *= 2
    return tuple(box)
