"""Slices of an array: those held by a device, those held by a chunk, and their overlaps."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

_MOST_CUT_DIMS = 10

Device = Any
"""A `jax.Device`, which JAX exports as a variable."""


class ArraySlice(NamedTuple):
    """A slice of an array: its start in each dimension, and its shape."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.shape))

    def relative_slices(self, outer: "ArraySlice") -> tuple[slice, ...]:
        """Return the position of this slice in an array that holds `outer`."""
        return tuple(slice(s - o, s - o + n) for s, n, o in zip(self.start, self.shape, outer.start))

    def overlap(self, other: "ArraySlice") -> "ArraySlice | None":
        """Return the overlap of both slices; None if it is empty.

        >>> ArraySlice((0, 0), (4, 4)).overlap(ArraySlice((2, 3), (4, 4)))
        ArraySlice(start=(2, 3), shape=(2, 1))
        """
        start = tuple(map(max, self.start, other.start))
        stop = tuple(min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape))
        if any(b >= e for b, e in zip(start, stop)):
            return None
        return ArraySlice(start, tuple(e - b for b, e in zip(start, stop)))

    def contiguous_in(self, outer: "ArraySlice") -> bool:
        """Return True if this slice's values are contiguous in a row-major array that holds `outer`."""
        partial = [n != m for n, m in zip(self.shape, outer.shape)]
        if True not in partial:
            return True
        last = len(partial) - 1 - partial[::-1].index(True)
        return all(n == 1 for n in self.shape[:last])


def full_slice(shape: Sequence[int]) -> ArraySlice:
    """Return the slice that is all of an array."""
    return ArraySlice((0,) * len(shape), tuple(shape))


def is_exact_cover(shape: Sequence[int], boxes: Sequence[ArraySlice]) -> bool:
    """Return True if each value of an array is in exactly one of the slices; they must be inside the
    array.

    A slice is determined by its signed corners. The corners of slices that cover the array exactly once sum to the
    corners of the array; those of other slices don't. Takes time in proportion to the number of slices.

    >>> is_exact_cover((2, 3), [ArraySlice((0, 0), (2, 1)), ArraySlice((0, 1), (2, 2))])
    True
    >>> is_exact_cover((4,), [ArraySlice((0,), (2,)), ArraySlice((0,), (2,))])  # two values twice
    False

    Raises:
        ValueError: The slices divide too many dimensions for this check.
    """
    filled = [box for box in boxes if box.size]
    size = math.prod(shape)
    if sum(box.size for box in filled) != size:
        return False
    if len(filled) == 1 or not size:
        return True
    # In a dimension in which every slice spans the array, corners show nothing.
    cut = [dim for dim, n in enumerate(shape) if any(box.shape[dim] != n for box in filled)]
    if len(cut) > _MOST_CUT_DIMS:
        raise ValueError(f"boxes that are cut in {len(cut)} dimensions; expected at most {_MOST_CUT_DIMS}")
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, box in [(1, full_slice(shape)), *((-1, box) for box in filled)]:
        ends = [((box.start[dim], 1), (box.start[dim] + box.shape[dim], -1)) for dim in cut]
        for corner in itertools.product(*ends):
            corners[tuple(at for at, _ in corner)] += sign * math.prod(s for _, s in corner)
    return not any(corners.values())


def slice_of_shard(index: Sequence[slice], shape: Sequence[int]) -> ArraySlice:
    """Convert an index of `slice` objects, the form that shardings use, to an `ArraySlice`."""
    bounds = [part.indices(n) for part, n in zip(index, shape)]
    return ArraySlice(tuple(b for b, _, _ in bounds), tuple(e - b for b, e, _ in bounds))


def split_slice(box: ArraySlice, limit: int) -> Iterator[ArraySlice]:
    """Split a slice into slices of at most `limit` values, each contiguous in it.

    >>> [piece.shape for piece in split_slice(ArraySlice((0, 0), (3, 10)), 20)]
    [(2, 10), (1, 10)]
    >>> [piece.start for piece in split_slice(ArraySlice((5, 0), (1, 10)), 4)]
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
        yield from split_slice(ArraySlice(start, shape), limit)


def slice_devices(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[ArraySlice, list[Device]]:
    """Return each distinct shard of an array with the devices that hold it, in the order of their ids."""
    found: dict[ArraySlice, list[Device]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(slice_of_shard(index, shape), []).append(device)
    return {box: sorted(found[box], key=lambda device: device.id) for box in sorted(found)}
