"""Boxes of an array: what a device holds, what a chunk holds, and where they meet."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

Device = Any
"""A `jax.Device`, which JAX exports as a variable."""


class Box(NamedTuple):
    """Part of an array: where it begins in each dimension, and how far it reaches."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.shape))

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Where this box lies in an array that holds `outer`."""
        return tuple(slice(s - o, s - o + n) for s, n, o in zip(self.start, self.shape, outer.start))

    def overlap(self, other: "Box") -> "Box | None":
        """What both hold; None for nothing.

        >>> Box((0, 0), (4, 4)).overlap(Box((2, 3), (4, 4)))
        Box(start=(2, 3), shape=(2, 1))
        """
        start = tuple(map(max, self.start, other.start))
        stop = tuple(min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape))
        if any(b >= e for b, e in zip(start, stop)):
            return None
        return Box(start, tuple(e - b for b, e in zip(start, stop)))

    def contiguous_in(self, outer: "Box") -> bool:
        """Whether this box's values stand one after another in a row-major array that holds `outer`."""
        partial = [n != m for n, m in zip(self.shape, outer.shape)]
        if True not in partial:
            return True
        last = len(partial) - 1 - partial[::-1].index(True)
        return all(n == 1 for n in self.shape[:last])


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of an array."""
    return Box((0,) * len(shape), tuple(shape))


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """The box of an index of slices, as shardings give them."""
    bounds = [part.indices(n) for part, n in zip(index, shape)]
    return Box(tuple(b for b, _, _ in bounds), tuple(e - b for b, e, _ in bounds))


def pieces(box: Box, limit: int) -> Iterator[Box]:
    """Cut a box into ones of at most `limit` values, each contiguous in it.

    >>> [piece.shape for piece in pieces(Box((0, 0), (3, 10)), 20)]
    [(2, 10), (1, 10)]
    >>> [piece.start for piece in pieces(Box((5, 0), (1, 10)), 4)]
    [(5, 0), (5, 4), (5, 8)]
    """
    if box.size <= limit:
        yield box
        return
    dim = next(d for d, n in enumerate(box.shape) if n > 1)
    row = box.size // box.shape[dim]
    step = max(1, limit // row)
    for begin in range(0, box.shape[dim], step):
        start = (*box.start[:dim], box.start[dim] + begin, *box.start[dim + 1 :])
        shape = (*box.shape[:dim], min(step, box.shape[dim] - begin), *box.shape[dim + 1 :])
        yield from pieces(Box(start, shape), limit)


def holders(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[Box, list[Device]]:
    """Each distinct part of an array to the devices that hold it, in the order of their ids."""
    found: dict[Box, list[Device]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(box_of(index, shape), []).append(device)
    return {box: sorted(found[box], key=lambda device: device.id) for box in sorted(found)}
