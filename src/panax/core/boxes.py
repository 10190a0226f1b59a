"""Boxes of neighbouring numbers that lie on one device on every usual mesh: what numbers in few bits share a scale by.

A scale for the next 256 numbers in storage would be another one on another mesh, and the same run would round otherwise there. So
the sides of a box are chosen by the array's logical shape alone, and leave each dimension enough boxes to be split over devices.
"""

from collections.abc import Sequence

from .logical import traits_of
from .protocols import Axes


def box_of(shape: Sequence[int], axes: Axes, own: Sequence[int], most: int) -> tuple[int, ...]:
    """The sides of a box of at most `most` numbers, a power of two.

    It takes powers of two from dimensions that rest whole, the last one first, and then in turn from those that rest split: along
    one that is split at rest alone (such as embed) at least 8 boxes are left, along one that is computed in parts 2.

    Args:
        own: The dimensions of one array, where `shape` is that of a stack of them.

    >>> box_of((12, 512, 384), ("layer", "embed", "kv_latent"), (1, 2), 256)
    (1, 2, 128)
    >>> box_of((12, 4096, 14336), ("layer", "embed", "ffn"), (1, 2), 256), box_of((96, 272), ("embed", "ffn"), (0, 1), 256)
    ((1, 8, 32), (4, 8))
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
