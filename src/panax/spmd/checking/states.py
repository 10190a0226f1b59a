"""What the devices along one mesh axis hold of a value: the states that the check follows."""

import enum
import functools
from collections.abc import Callable, Iterable
from typing import Any

from ..marks import ValueState


class Kind(enum.IntEnum):
    ZERO = 0
    """Zeros, which are any of the following."""
    CONSTANT = 1
    """Known when the step is traced; a count of a device's own rows is one, and may be a term of a sum."""
    WHOLE = 2
    SPLIT = 3
    PARTIAL = 4
    UNKNOWN = 5
    """Different on each device, and not followed: what an unknown kernel makes of split operands."""
    WRONG = 6


Part = tuple[int, int, int]
"""(dimension, low, high): a split may lie along the indices of a dimension in steps of `low` up to `high`, in elements. Where
dimensions were put together, `low` is the product of those behind the split one. High is 0 for a whole dimension."""


class AxisState:
    """The state of a value along one mesh axis; immutable.

    Attributes:
        parts: Of a split value, the dimensions that its parts may lie along; none where it is a device's own.
        dims: Their numbers.
        source: The equation that it comes from, where a message needs that.
        reason: What is wrong.
    """

    __slots__ = ("dims", "kind", "parts", "reason", "source")

    def __init__(self, kind: Kind, parts: frozenset[Part] = frozenset(), source: Any = None, reason: str = ""):
        self.kind, self.parts, self.source, self.reason = kind, parts, source, reason
        self.dims = frozenset(part[0] for part in parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AxisState) and self.kind is other.kind and self.parts == other.parts

    def __hash__(self) -> int:
        return hash((self.kind, self.parts))

    def moved(self, place: Callable[[int], int | None]) -> set[Part]:
        """Its parts where the dimensions have other numbers; None for one that is gone."""
        return {(int(to), low, high) for dim, low, high in self.parts if (to := place(dim)) is not None}

    def __repr__(self) -> str:
        return f"{self.kind.name.lower()}{sorted(self.parts) if self.parts else ''}"


ZERO, CONSTANT, WHOLE, PARTIAL, UNKNOWN = map(
    AxisState, (Kind.ZERO, Kind.CONSTANT, Kind.WHOLE, Kind.PARTIAL, Kind.UNKNOWN)
)

LONE = AxisState(Kind.PARTIAL)
"""The sum over a split dimension of which each device has a single element: a term, or, since JAX transposes a broadcast along
such a dimension to a sum, that element. It equals `PARTIAL`, and counts as one until it meets a device's own part."""


@functools.lru_cache(maxsize=4096)
def _split(parts: frozenset[Part]) -> AxisState:
    return AxisState(Kind.SPLIT, parts)


def split(along: Iterable[int | Part], source: Any = None) -> AxisState:
    """Split along some of these dimensions, or parts of them; along none, a device's own."""
    parts = frozenset(part if isinstance(part, tuple) else (int(part), 1, 0) for part in along)
    return AxisState(Kind.SPLIT, parts, source) if source is not None and not parts else _split(parts)


def wrong(source: Any, reason: str) -> AxisState:
    return AxisState(Kind.WRONG, source=source, reason=reason)


def is_own(state: AxisState) -> bool:
    return state.kind is Kind.SPLIT and not state.dims


def of(holds: ValueState, dim: int) -> AxisState:
    """The state that a mark declares, of what is split along `dim` if it is split."""
    if holds is ValueState.SPLIT:
        return split((dim,))
    return {
        ValueState.WHOLE: WHOLE,
        ValueState.OWN: split(()),
        ValueState.PARTIAL: PARTIAL,
        ValueState.UNKNOWN: UNKNOWN,
    }[holds]


def worst(states: Iterable[AxisState]) -> AxisState | None:
    """The first one that is wrong."""
    return next((state for state in states if state.kind is Kind.WRONG), None)


def together(states: Iterable[AxisState]) -> AxisState:
    """Of a value that each element of depends on the same elements of values in these states, none of them partial."""
    kinds = {state.kind: state for state in states}
    if Kind.WRONG in kinds:
        return kinds[Kind.WRONG]
    if Kind.UNKNOWN in kinds:
        return UNKNOWN
    if Kind.SPLIT in kinds:
        return _union(state for state in states if state.kind is Kind.SPLIT)
    return WHOLE if Kind.WHOLE in kinds else CONSTANT


def _union(states: Iterable[AxisState]) -> AxisState:
    first, *rest = states
    parts = first.parts.union(*(state.parts for state in rest))
    return first if parts == first.parts else _split(parts)


def join_states(a: AxisState, b: AxisState, source: Any) -> AxisState:
    """Of a value that is one or the other, as a loop's carry or the result of branches."""
    if a is b or a == b or b.kind is Kind.ZERO or a.kind is Kind.WRONG:
        return a
    if a.kind is Kind.ZERO or b.kind is Kind.WRONG:
        return b
    if Kind.UNKNOWN in (a.kind, b.kind):
        return UNKNOWN
    if Kind.PARTIAL in (a.kind, b.kind):
        other = b if a.kind is Kind.PARTIAL else a
        return wrong(source, f"is now a term of a sum, now {describe_state(other)}")
    return together((a, b))


def describe_state(state: AxisState) -> str:
    """As a message says it."""
    return {
        Kind.ZERO: "zero",
        Kind.CONSTANT: "the same constant on every device",
        Kind.WHOLE: "equal on every device",
        Kind.SPLIT: "a device's own part" if state.dims else "a value of each device's own",
        Kind.PARTIAL: "a term of a sum over devices",
        Kind.UNKNOWN: "not known",
        Kind.WRONG: "wrong",
    }[state.kind]
