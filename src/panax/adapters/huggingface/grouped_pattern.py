"""Patterns of a tensor in which the rows of several parameters alternate, group by group."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .pattern import IndexRange, Pattern


class GroupedPattern(Pattern):
    """A matrix with rows that run over groups, and within a group over the rows of each parameter that belong to it.

    "(key_heads: key_heads key_dim|heads value_dim) embed" has for each key head first its own rows, then those of the
    value heads that share it: `heads / key_heads` of them, adjacent ones. A part's first axis is the one that is
    divided among the groups; `part` selects between the bars.

    >>> GroupedPattern("(g: g a|h b) e").shape({"g": 2, "a": 3, "h": 4, "b": 5, "e": 7})
    (26, 7)
    """

    def __init__(self, text: str):
        super().__init__(text.replace(":", "|", 1))
        self.text = text
        ((self._group,), *parts), *rest = self._groups
        self._parts: tuple[tuple[str, ...], ...] = tuple(parts)
        if not all(len(each) == 1 and len(each[0]) == 1 for each in rest):
            raise ValueError(f"{text!r}: expected one axis for each dimension after the first")
        self._rest: tuple[str, ...] = tuple(each[0][0] for each in rest)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        widths = sum(self._width(part, sizes) for part in range(len(self._parts)))
        return sizes[self._group] * widths, *(sizes[axis] for axis in self._rest)

    def read(
        self, tensor: Any, axes: Sequence[str], sizes: Mapping[str, int], ranges: Sequence[IndexRange], part: int
    ) -> np.ndarray:
        """Read the region `ranges` of a parameter; whole groups are read, those that hold any of it.

        >>> tensor = np.arange(8)[:, None]  # of two groups: two rows of a, then two of h
        >>> sizes = {"g": 2, "a": 2, "h": 4, "e": 1}
        >>> GroupedPattern("(g: g a|h) e").read(tensor, ("h", "e"), sizes, ((1, 4), (0, 1)), 1).ravel().tolist()
        [3, 6, 7]
        """
        wanted, part_axes = dict(zip(axes, ranges)), self._parts[part]
        each = self._heads_of_group(part, sizes)
        low, high = wanted[part_axes[0]]
        first, last = low // each, -(-high // each)
        height = self.shape(sizes)[0] // sizes[self._group]
        rows = tensor[(slice(first * height, last * height), *(slice(*wanted[axis]) for axis in self._rest))]
        block = rows.reshape(last - first, height, *rows.shape[1:])[:, self._span(part, sizes)]
        block = block.reshape((last - first) * each, *(sizes[axis] for axis in part_axes[1:]), *rows.shape[1:])
        inside = [slice(low - first * each, high - first * each), *(slice(*wanted[axis]) for axis in part_axes[1:])]
        return np.transpose(block[tuple(inside)], [(*part_axes, *self._rest).index(axis) for axis in axes])

    def write(
        self, tensor: np.ndarray, axes: Sequence[str], sizes: Mapping[str, int], array: np.ndarray, part: int
    ) -> None:
        groups = sizes[self._group]
        by_group = tensor.reshape(groups, tensor.shape[0] // groups, *tensor.shape[1:])
        rows = np.transpose(array, [axes.index(axis) for axis in (*self._parts[part], *self._rest)])
        by_group[:, self._span(part, sizes)] = rows.reshape(groups, self._width(part, sizes), *tensor.shape[1:])

    def _heads_of_group(self, part: int, sizes: Mapping[str, int]) -> int:
        """Return how many entries of a part's first axis belong to one group."""
        return sizes[self._parts[part][0]] // sizes[self._group]

    def _width(self, part: int, sizes: Mapping[str, int]) -> int:
        """Return the rows of a part in one group."""
        return math.prod(sizes[axis] for axis in self._parts[part]) // sizes[self._group]

    def _span(self, part: int, sizes: Mapping[str, int]) -> slice:
        """Return the rows of a part within those of a group."""
        before = sum(self._width(earlier, sizes) for earlier in range(part))
        return slice(before, before + self._width(part, sizes))
