"""States of a value along one mesh axis: how the devices' values relate."""

import enum
import functools
from collections.abc import Callable, Iterable
from typing import Any

from ..sharding_marks import ValueState


class Kind(enum.IntEnum):
    ZERO = 0
    """Zeros, which are valid as any of the following."""
    CONSTANT = 1
    """Known at tracing time. A count of a device's rows is one, and may be a partial sum."""
    WHOLE = 2
    SPLIT = 3
    PARTIAL = 4
    UNKNOWN = 5
    """Different on each device and not tracked, such as an unknown kernel's result from split operands."""
    WRONG = 6


Part = tuple[int, int, int]
"""(dimension, low, high): a value may be split along the indices of a dimension, in steps of `low` up to
`high` elements.

For merged dimensions, `low` is the product of those after the split one. `high` is 0 for a whole dimension.
"""


class AxisState:
    """State of a value along one mesh axis; immutable.

    Attributes:
        parts: For a split value, the dimensions that it may be split along; empty if each device's value is
            independent.
        dims: The dimension numbers of `parts`.
        source: The equation that produced it, if an error message needs it.
        reason: The error, if the state is wrong.
    """

    __slots__ = ("dims", "kind", "parts", "reason", "source")

    def __init__(self, kind: Kind, parts: frozenset[Part] = frozenset(), source: Any = None, reason: str = ""):
        self.kind, self.parts, self.source, self.reason = kind, parts, source, reason
        self.dims = frozenset(part[0] for part in parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AxisState) and self.kind is other.kind and self.parts == other.parts

    def __hash__(self) -> int:
        return hash((self.kind, self.parts))

    def move_dims(self, place: Callable[[int], int | None]) -> set[Part]:
        """Return the parts with renumbered dimensions.

        Args:
            place: Old to new dimension number; None for a dimension that is removed.
        """
        return {(int(to), low, high) for dim, low, high in self.parts if (to := place(dim)) is not None}

    def __repr__(self) -> str:
        return f"{self.kind.name.lower()}{sorted(self.parts) if self.parts else ''}"


ZERO, CONSTANT, WHOLE, PARTIAL, UNKNOWN = map(
    AxisState, (Kind.ZERO, Kind.CONSTANT, Kind.WHOLE, Kind.PARTIAL, Kind.UNKNOWN)
)

LONE = AxisState(Kind.PARTIAL)
"""The sum over a split dimension with a single element per device.

It is either a partial sum or, since JAX transposes a broadcast along such a dimension to a sum, that
element. It equals `PARTIAL`, and counts as partial until it is combined with a split value.
"""


@functools.lru_cache(maxsize=4096)
def _split(parts: frozenset[Part]) -> AxisState:
    return AxisState(Kind.SPLIT, parts)


def sharded_state(along: Iterable[int | Part], source: Any = None) -> AxisState:
    """Return a state split along some of these dimensions, or parts of them; along none, each device's value
    is independent.
    """
    parts = frozenset(part if isinstance(part, tuple) else (int(part), 1, 0) for part in along)
    return AxisState(Kind.SPLIT, parts, source) if source is not None and not parts else _split(parts)


def wrong_state(source: Any, reason: str) -> AxisState:
    return AxisState(Kind.WRONG, source=source, reason=reason)


def declared_state(holds: ValueState, dim: int) -> AxisState:
    """Return the state that a mark asserts; `dim` is the dimension of a split value."""
    if holds is ValueState.SPLIT:
        return sharded_state((dim,))
    return {
        ValueState.WHOLE: WHOLE,
        ValueState.OWN: sharded_state(()),
        ValueState.PARTIAL: PARTIAL,
        ValueState.UNKNOWN: UNKNOWN,
    }[holds]


def first_wrong(states: Iterable[AxisState]) -> AxisState | None:
    """Return the first state that is wrong, if any."""
    return next((state for state in states if state.kind is Kind.WRONG), None)


def combine_states(states: Iterable[AxisState]) -> AxisState:
    """Combine the states of operands of an elementwise operation, none of them partial."""
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
    """Join the states of a value that is one of two, such as a loop's carry or the result of branches."""
    if a is b or a == b or b.kind is Kind.ZERO or a.kind is Kind.WRONG:
        return a
    if a.kind is Kind.ZERO or b.kind is Kind.WRONG:
        return b
    if Kind.UNKNOWN in (a.kind, b.kind):
        return UNKNOWN
    if Kind.PARTIAL in (a.kind, b.kind):
        other = b if a.kind is Kind.PARTIAL else a
        return wrong_state(source, f"is a partial sum on one path and {describe_state(other)} on another")
    return combine_states((a, b))


def describe_state(state: AxisState) -> str:
    """Format a state for an error message."""
    return {
        Kind.ZERO: "zero",
        Kind.CONSTANT: "the same constant on every device",
        Kind.WHOLE: "equal on every device",
        Kind.SPLIT: "a device's own part" if state.dims else "a value of each device's own",
        Kind.PARTIAL: "a partial sum over devices",
        Kind.UNKNOWN: "not known",
        Kind.WRONG: "wrong",
    }[state.kind]
