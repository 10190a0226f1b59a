"""Bounds of the integers in a graph, from constants, shapes and the operations between."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten

INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class IntegerRange:
    """All integers from `low` to `high`, both included."""

    low: int
    high: int

    def is_within(self, other: "IntegerRange") -> bool:
        return other.low <= self.low and self.high <= other.high

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def union(self, other: "IntegerRange") -> "IntegerRange":
        return IntegerRange(min(self.low, other.low), max(self.high, other.high))


FULL_RANGE = IntegerRange(-INT32_MAX - 1, INT32_MAX)


class RangeAnalysis:
    """Ranges of the nodes of one graph, queried in the graph's order; each range is computed once."""

    def __init__(self, constants: Mapping[str, torch.Tensor]):
        self._constants = constants
        self._found: dict[Node, IntegerRange] = {}

    def of(self, value: Any) -> IntegerRange:
        """Return the range of a node or a number, clipped to 32 bits; larger values are caught at the
        source."""
        if not isinstance(value, Node):
            return IntegerRange(math.floor(value), math.ceil(value)) if isinstance(value, int | float) else FULL_RANGE
        if value not in self._found:
            raw = self._raw(value)
            self._found[value] = IntegerRange(max(raw.low, FULL_RANGE.low), min(raw.high, FULL_RANGE.high))
        return self._found[value]

    def may_overflow(self, node: Node) -> bool:
        """Return True if an operation on 64-bit integers can produce an integer that 32 bits can't hold."""
        packet = getattr(node.target, "overloadpacket", None)
        return packet in _GROWING and not self._raw(node).is_within(FULL_RANGE)

    def _raw(self, node: Node) -> IntegerRange:
        dtype = getattr(node.meta.get("val"), "dtype", None)
        if node.op == "get_attr":
            tensor = self._constants[str(node.target)]
            if tensor.numel() and not tensor.is_floating_point() and not tensor.is_complex():
                return IntegerRange(int(tensor.min()), int(tensor.max()))
            return FULL_RANGE
        if dtype == torch.bool:
            return IntegerRange(0, 1)
        if dtype is not None and not dtype.is_floating_point and not dtype.is_complex and dtype.itemsize < 4:
            limits = torch.iinfo(dtype)
            return IntegerRange(limits.min, limits.max)
        rule = _RULES.get(getattr(node.target, "overloadpacket", None))
        if rule is None and getattr(node.target, "overloadpacket", None) in _GROWING:
            return IntegerRange(-(2**63), 2**63)
        return FULL_RANGE if rule is None else rule(self, node)


def _numel(node: Any) -> int:
    return max(math.prod(node.meta["val"].shape), 1)


def _corners(ranges: RangeAnalysis, node: Node, combine: Callable[[int, int], int]) -> IntegerRange:
    a, b = (ranges.of(each) for each in node.args[:2])
    values = [combine(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    return IntegerRange(min(values), max(values))


def _add(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    alpha: Any = node.kwargs.get("alpha", 1)
    return _corners(ranges, node, lambda x, y: math.ceil(x + alpha * y))


def _sub(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    alpha: Any = node.kwargs.get("alpha", 1)
    return _corners(ranges, node, lambda x, y: math.ceil(x - alpha * y))


def _sum(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    terms = _numel(node.args[0]) // _numel(node)
    each = ranges.of(node.args[0])
    return IntegerRange(min(each.low * terms, each.low), max(each.high * terms, each.high))


def _cumsum(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    each, terms = ranges.of(node.args[0]), _numel(node.args[0])
    return IntegerRange(min(each.low * terms, each.low), max(each.high * terms, each.high))


def _cast(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    source: Any = node.args[0]
    if source.meta["val"].dtype.is_floating_point:
        return IntegerRange(-(2**63), 2**63)
    return ranges.of(source)


def _shifted(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    by = ranges.of(node.args[1])
    if by.low < 0 or by.high > 62:
        return IntegerRange(-(2**63), 2**63)
    return _corners(ranges, node, lambda x, y: x * 2 ** min(max(y, 0), 62))


def _shifted_down(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    found, by = ranges.of(node.args[0]), ranges.of(node.args[1])
    if by.low < 0:
        return FULL_RANGE
    return IntegerRange(min(found.low >> min(by.low, 63), 0), max(found.high >> min(by.low, 63), 0))


def _masked(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    a, b = (ranges.of(each) for each in node.args[:2])
    bounds = [each.high for each in (a, b) if each.low >= 0]
    return IntegerRange(0, min(bounds)) if bounds else FULL_RANGE


def _negated(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    found = ranges.of(node.args[0])
    return IntegerRange(-found.high, -found.low)


def _absolute(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    found = ranges.of(node.args[0])
    return IntegerRange(0, max(abs(found.low), abs(found.high)))


ACCUMULATING_OPS = {
    aten.scatter_add: (0, 3), aten.scatter_reduce: (0, 3), aten.index_add: (0, 3), aten.index_reduce: (0, 3),
    aten.index_put: (0, 2), aten._unsafe_index_put: (0, 2), aten.scatter: (0, 3),
}  # fmt: skip
"""Operations that may add at indices, and the indices of their arguments that are values."""


def _added_at(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    """Return the range after additions at indices: each element at most as often as there are values."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    onto, place = (ranges.of(node.args[i]) if i < len(node.args) else FULL_RANGE for i in ACCUMULATING_OPS[packet])
    args: Any = node.args
    if packet in (aten.index_put, aten._unsafe_index_put) and not (len(args) > 3 and args[3]):
        return onto.union(place)
    if packet is aten.scatter and "reduce" not in node.kwargs and len(args) < 5:
        return onto.union(place)
    if packet in (aten.scatter_reduce, aten.index_reduce) and not {"sum", "prod"} & set(map(str, args[4:5])):
        return onto.union(place)
    if "prod" in map(str, args) or node.kwargs.get("reduce") == "multiply":
        return IntegerRange(-(2**63), 2**63)
    source: Any = args[ACCUMULATING_OPS[packet][1]]
    times = _numel(source) if isinstance(source, Node) else _numel(node)
    alpha: Any = node.kwargs.get("alpha", 1)
    times *= max(1, abs(int(alpha)))
    return IntegerRange(onto.low + times * min(place.low, 0), onto.high + times * max(place.high, 0))


def _remainder(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    by = ranges.of(node.args[1])
    return IntegerRange(0, by.high - 1) if by.low > 0 else FULL_RANGE


def _clamp(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    found = ranges.of(node.args[0])
    low, high = ((*node.args, None, None)[1:3]) if len(node.args) < 3 else node.args[1:3]
    bottom = found.low if low is None else max(found.low, ranges.of(low).low)
    top = found.high if high is None else min(found.high, ranges.of(high).high)
    return IntegerRange(bottom, max(top, bottom))


def _arange(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    numbers: Any = node.args
    start, end = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
    return IntegerRange(math.floor(min(start, end)), math.ceil(max(start, end)))


def _filled(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    value: Any = node.kwargs.get("fill_value", node.args[-1] if node.args else 0)
    return ranges.of(value)


def _either(first: int) -> Callable[[RangeAnalysis, Node], IntegerRange]:
    return lambda ranges, node: ranges.of(node.args[first]).union(ranges.of(node.args[first + 1]))


def _joined(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    parts: Any = node.args[0]
    found = [ranges.of(part) for part in parts]
    return IntegerRange(min(part.low for part in found), max(part.high for part in found))


def _place(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    return IntegerRange(0, _numel(node.args[0]) - 1)


def _same(ranges: RangeAnalysis, node: Node) -> IntegerRange:
    return ranges.of(node.args[0])


_RULES: dict[Any, Callable[[RangeAnalysis, Node], IntegerRange]] = {
    aten.add: _add, aten.sub: _sub, aten.mul: lambda r, n: _corners(r, n, lambda x, y: x * y), aten.sum: _sum,
    aten.cumsum: _cumsum,
    aten._to_copy: _cast, aten.remainder: _remainder, aten.clamp: _clamp, aten.arange: _arange, aten.full: _filled,
    aten.full_like: _filled, aten.scalar_tensor: _filled, aten.where: _either(1), aten.cat: _joined, aten.stack: _joined,
    aten.argmax: _place, aten.argmin: _place, aten.argsort: _place, aten.zeros: lambda r, n: IntegerRange(0, 0),
    aten.zeros_like: lambda r, n: IntegerRange(0, 0), aten.ones: lambda r, n: IntegerRange(1, 1),
    aten.ones_like: lambda r, n: IntegerRange(1, 1),
    aten.maximum: _either(0), aten.minimum: _either(0),
    aten.bitwise_left_shift: _shifted, aten.__lshift__: _shifted, aten.bitwise_right_shift: _shifted_down,
    aten.__rshift__: _shifted_down, aten.bitwise_and: _masked, aten.neg: _negated, aten.abs: _absolute,
    **dict.fromkeys(ACCUMULATING_OPS, _added_at),
} | dict.fromkeys(
    [
        getattr(aten, name)
        for name in (
            "view", "_unsafe_view", "expand", "expand_copy", "view_copy", "unsqueeze", "unsqueeze_copy", "squeeze",
            "squeeze_copy",
            "slice", "slice_copy", "select", "select_copy", "permute", "permute_copy", "transpose", "transpose_copy", "clone",
            "alias", "alias_copy", "detach", "detach_copy", "repeat", "index", "index_select", "gather", "flip", "roll",
            "lift_fresh_copy", "t_copy", "diagonal_copy", "amax", "amin", "contiguous", "unfold_copy",
        )
    ],
    _same,
)  # fmt: skip

_GROWING = {
    aten.add, aten.sub, aten.rsub, aten.mul, aten.pow, aten.sum, aten.cumsum, aten.prod, aten.cumprod, aten._to_copy, aten.mm,
    aten.bmm, aten.dot, aten.mv, aten.square, aten.addcmul, aten.addmm, aten.addmv, aten.addbmm, aten.baddbmm, aten.addr,
    aten.neg, aten.abs, aten.bitwise_left_shift, aten.__lshift__, aten.convolution, aten.trace, *ACCUMULATING_OPS,
}  # fmt: skip
"""Operations with results that may be larger integers than their arguments."""
