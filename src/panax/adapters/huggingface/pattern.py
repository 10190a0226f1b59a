"""Patterns of how a foreign tensor's dimensions are composed of a parameter's logical axes, and the copy in
both directions.

"(heads head_dim) embed" is a matrix with rows that run over all heads' features, from a parameter of three
dimensions in whichever order it has them. A number is an axis along which several parameters are
concatenated: "embed (3 heads head_dim)" holds query, key and value next to each other, and `part` selects one
of them. If they differ in size they are named: "(heads+kv_heads+kv_heads head_dim) embed". Parts of different
axes are separated by bars: "(ssm_heads ssm_head_dim|ssm_heads) embed" has two, of which the second one has an
axis less. "1" is a dimension of size 1.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

IndexRange = tuple[int, int]
"""First index, and one past the last."""


class Pattern:
    """A parsed pattern.

    >>> Pattern("embed (3 heads head_dim)").shape({"embed": 8, "heads": 2, "head_dim": 4})
    (8, 24)
    """

    def __init__(self, text: str):
        self.text = text
        groups = re.findall(r"\(([^)]*)\)|(\S+)", text)
        self._groups: tuple[tuple[tuple[str, ...], ...], ...] = tuple(
            tuple(tuple(part.split()) for part in (merged or single).split("|")) for merged, single in groups
        )

    @property
    def named(self) -> frozenset[str]:
        """Return the logical axes for which the pattern needs a size."""
        axes = (axis for parts in self._groups for part in parts for axis in part)
        return frozenset(name for axis in axes if not axis.isdigit() for name in axis.split("+"))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the foreign tensor's shape, given the size of each logical axis."""
        return tuple(sum(_length(part, sizes) for part in parts) for parts in self._groups)

    @property
    def matrix(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Return the axes of the rows and of the columns of a matrix that holds one parameter; None for others.

        >>> Pattern("(heads head_dim) embed").matrix, Pattern("embed (3 heads head_dim)").matrix
        ((('heads', 'head_dim'), ('embed',)), None)
        """
        if len(self._groups) != 2 or any(len(parts) != 1 for parts in self._groups):
            return None
        (rows,), (columns,) = self._groups
        return None if any(axis.isdigit() or "+" in axis for axis in rows + columns) else (rows, columns)

    def read(
        self, tensor: Any, axes: Sequence[str], sizes: Mapping[str, int], ranges: Sequence[IndexRange], part: int
    ) -> np.ndarray:
        """Read the region `ranges` of a parameter with these axes; only the smallest contiguous block is
        read.

        Args:
            tensor: An array, or a safetensors slice, indexed once by a tuple of slices.
            axes: The parameter's own axes, in its order; `ranges` has one range for each.
            part: Index along a number in the pattern, in a sum of axes, or between bars.

        >>> Pattern("b a").read(np.arange(6).reshape(2, 3), ("a", "b"), {"a": 3, "b": 2}, ((1, 3), (0, 2)), 0).tolist()
        [[1, 4], [2, 5]]
        >>> Pattern("(a b|a)").read(np.arange(9), ("a",), {"a": 3, "b": 2}, ((1, 3),), 1).tolist()
        [7, 8]
        """
        range_by_axis = dict(zip(axes, ranges))
        spans, shape, inside = [], [], []
        for group, before in self._own_groups(sizes, part):
            group_ranges = [_range(axis, sizes, range_by_axis, part) for axis in group]
            span, block, within = _contiguous([_size(axis, sizes) for axis in group], group_ranges)
            spans.append(slice(before + span.start, before + span.stop))
            shape += block
            inside += within
        block = tensor[tuple(spans)].reshape(shape)[tuple(inside)]
        part_axes = self._own_axes(part)
        block = block[tuple(0 if axis.isdigit() else slice(None) for axis in part_axes)]
        return np.transpose(block, _order(part_axes, axes, part))

    def write(
        self, tensor: np.ndarray, axes: Sequence[str], sizes: Mapping[str, int], array: np.ndarray, part: int
    ) -> None:
        """Write a whole parameter into its region of `tensor`, which is contiguous and has this shape."""
        groups, part_axes = self._own_groups(sizes, part), self._own_axes(part)
        region = tensor[tuple(slice(before, before + _length(group, sizes)) for group, before in groups)]
        at = tuple(
            _range(axis, sizes, {}, part)[0]
            if axis.isdigit()
            else slice(*_range(axis, sizes, {name: (0, sizes[name]) for name in axes}, part))
            for axis in part_axes
        )
        # A copy if the region is not contiguous: written back whole.
        block = np.array(region).reshape([_size(axis, sizes) for axis in part_axes])
        block[at] = np.transpose(array, np.argsort(_order(part_axes, axes, part)))
        region[...] = block.reshape(region.shape)

    def _own_groups(self, sizes: Mapping[str, int], part: int) -> list[tuple[tuple[str, ...], int]]:
        """Return, for each dimension, the axes of a part, and the length of the parts before it."""
        groups = []
        for parts in self._groups:
            place = part if len(parts) > 1 else 0
            groups.append((parts[place], sum(_length(before, sizes) for before in parts[:place])))
        return groups

    def _own_axes(self, part: int) -> tuple[str, ...]:
        return tuple(axis for parts in self._groups for axis in parts[part if len(parts) > 1 else 0])


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
        """Read the region `ranges` of a parameter; all groups that overlap it are read completely.

        >>> tensor = np.arange(8)[:, None]  # of two groups: two rows of a, then two of h
        >>> sizes = {"g": 2, "a": 2, "h": 4, "e": 1}
        >>> GroupedPattern("(g: g a|h) e").read(tensor, ("h", "e"), sizes, ((1, 4), (0, 1)), 1).ravel().tolist()
        [3, 6, 7]
        """
        range_by_axis, part_axes = dict(zip(axes, ranges)), self._parts[part]
        each = self._heads_of_group(part, sizes)
        low, high = range_by_axis[part_axes[0]]
        first, last = low // each, -(-high // each)
        height = self.shape(sizes)[0] // sizes[self._group]
        rows = tensor[(slice(first * height, last * height), *(slice(*range_by_axis[axis]) for axis in self._rest))]
        block = rows.reshape(last - first, height, *rows.shape[1:])[:, self._span(part, sizes)]
        block = block.reshape((last - first) * each, *(sizes[axis] for axis in part_axes[1:]), *rows.shape[1:])
        inside = [
            slice(low - first * each, high - first * each),
            *(slice(*range_by_axis[axis]) for axis in part_axes[1:]),
        ]
        return np.transpose(block[tuple(inside)], [(*part_axes, *self._rest).index(axis) for axis in axes])

    def write(
        self, tensor: np.ndarray, axes: Sequence[str], sizes: Mapping[str, int], array: np.ndarray, part: int
    ) -> None:
        groups = sizes[self._group]
        by_group = tensor.reshape(groups, tensor.shape[0] // groups, *tensor.shape[1:])
        rows = np.transpose(array, [axes.index(axis) for axis in (*self._parts[part], *self._rest)])
        by_group[:, self._span(part, sizes)] = rows.reshape(groups, self._width(part, sizes), *tensor.shape[1:])

    def _heads_of_group(self, part: int, sizes: Mapping[str, int]) -> int:
        """Return the number of entries of a part's first axis in one group."""
        return sizes[self._parts[part][0]] // sizes[self._group]

    def _width(self, part: int, sizes: Mapping[str, int]) -> int:
        """Return the number of rows of a part in one group."""
        return math.prod(sizes[axis] for axis in self._parts[part]) // sizes[self._group]

    def _span(self, part: int, sizes: Mapping[str, int]) -> slice:
        """Return the range of a part's rows within a group's."""
        before = sum(self._width(earlier, sizes) for earlier in range(part))
        return slice(before, before + self._width(part, sizes))


def _order(part_axes: Sequence[str], axes: Sequence[str], part: int) -> list[int]:
    named = [_axis_of_part(axis, part) for axis in part_axes if not axis.isdigit()]
    return [named.index(axis) for axis in axes]


def _length(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    return math.prod(_size(axis, sizes) for axis in axes)


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    return int(axis) if axis.isdigit() else sum(sizes[name] for name in axis.split("+"))


def _axis_of_part(axis: str, part: int) -> str:
    """Return the logical axis of a part in a sum of axes; any other axis itself."""
    names = axis.split("+")
    return names[part] if len(names) > 1 else axis


def _range(axis: str, sizes: Mapping[str, int], ranges: Mapping[str, IndexRange], part: int) -> IndexRange:
    """Return the range that a part's region, given by `ranges`, has along an axis of the pattern."""
    if axis.isdigit():
        return (0, 1) if axis == "1" else (part, part + 1)
    low, high = ranges[_axis_of_part(axis, part)]
    before = sum(sizes[name] for name in axis.split("+")[:part]) if "+" in axis else 0
    return before + low, before + high


def _contiguous(sizes: Sequence[int], ranges: Sequence[IndexRange]) -> tuple[slice, list[int], list[slice]]:
    """Return the shortest run along a merged dimension that covers `ranges`; its shape unmerged; the ranges
    inside it."""
    start, inner = 0, math.prod(sizes)
    for place, (size, (low, high)) in enumerate(zip(sizes, ranges)):
        inner //= size
        start += low * inner
        if high - low != 1 or place == len(sizes) - 1:
            shape = [1] * place + [high - low, *sizes[place + 1 :]]
            inside = [slice(None)] * (place + 1) + [slice(*r) for r in ranges[place + 1 :]]
            return slice(start, start + (high - low) * inner), shape, inside
    raise AssertionError("a dimension without axes")
