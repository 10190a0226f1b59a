"""Minimum, maximum and order of measured values, some of which may be NaN or infinite.

With a NaN, Python's `min`, `max` and `sorted` depend on the order of their input: `min([nan, 1.0])` is NaN,
`min([1.0, nan])` is 1.0. Here a non-finite value never wins, and sorts last.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
D = TypeVar("D")

_NOTHING: Any = object()


def min_finite(values: Iterable[T], *, key: Callable[[T], Any] | None = None, default: D = _NOTHING) -> T | D:
    """Return the item with the smallest finite value; the first item if no value is finite.

    Args:
        key: Maps an item to its value, a number or a tuple of numbers. By default the item is the value.
        default: Returned if there are no items.

    Raises:
        ValueError: There are no items and no default.

    >>> min_finite([math.nan, 2.0, 1.0]), min_finite([math.nan])
    (1.0, nan)
    >>> min_finite([(math.nan, "a"), (3.0, "b")], key=lambda pair: pair[0])
    (3.0, 'b')
    """
    return _first(sort_finite_first(values, key=key), default)


def max_finite(values: Iterable[T], *, key: Callable[[T], Any] | None = None, default: D = _NOTHING) -> T | D:
    """Return the item with the largest finite value; the first item if no value is finite. Arguments as in
    `min_finite`.

    >>> max_finite([math.inf, 1.0, 2.0, math.nan])
    2.0
    """
    finite, others = _parted(values, key)
    return max(finite, key=key) if finite else _first(others, default)  # type: ignore[type-var,arg-type]


def sort_finite_first(values: Iterable[T], *, key: Callable[[T], Any] | None = None) -> list[T]:
    """Return the items in ascending order of value; those that are not finite come last, in input order.

    >>> sort_finite_first([math.nan, 3, -math.inf, 1])
    [1, 3, nan, -inf]
    """
    finite, others = _parted(values, key)
    return [*sorted(finite, key=key), *others]  # type: ignore[type-var,arg-type]


def _parted(values: Iterable[T], key: Callable[[T], Any] | None) -> tuple[list[T], list[T]]:
    finite: list[T] = []
    others: list[T] = []
    for value in values:
        (finite if _is_finite(value if key is None else key(value)) else others).append(value)
    return finite, others


def _is_finite(figure: Any) -> bool:
    if isinstance(figure, tuple):
        return all(_is_finite(part) for part in figure)
    return not isinstance(figure, float) or math.isfinite(figure)


def _first(values: list[T], default: D) -> T | D:
    if values:
        return values[0]
    if default is _NOTHING:
        raise ValueError("there are no values to compare; expected at least one")
    return default
