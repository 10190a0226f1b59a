"""The least, the greatest and the order of measured figures, of which some may be NaN or infinite.

Python's `min`, `max` and `sorted` give what the order of the figures happens to give where one is NaN: `min([nan, 1.0])` is NaN,
`min([1.0, nan])` is 1.0. Here a figure that is not finite never wins, and stands last.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
D = TypeVar("D")

_NOTHING: Any = object()


def least(values: Iterable[T], *, key: Callable[[T], Any] | None = None, default: D = _NOTHING) -> T | D:
    """The value with the smallest finite figure; the first one where no figure is finite.

    Args:
        key: The figure of a value: a number, or a tuple of them. None: the value is the figure.
        default: What is returned where there are no values.

    Raises:
        ValueError: There are no values, and no default.

    >>> least([math.nan, 2.0, 1.0]), least([math.nan]), least([(math.nan, "a"), (3.0, "b")], key=lambda pair: pair[0])
    (1.0, nan, (3.0, 'b'))
    """
    return _first(ascending(values, key=key), default)


def greatest(values: Iterable[T], *, key: Callable[[T], Any] | None = None, default: D = _NOTHING) -> T | D:
    """The value with the largest finite figure; the first one where no figure is finite. As `least` in all else.

    >>> greatest([math.inf, 1.0, 2.0, math.nan])
    2.0
    """
    finite, others = _parted(values, key)
    return max(finite, key=key) if finite else _first(others, default)  # type: ignore[type-var,arg-type]


def ascending(values: Iterable[T], *, key: Callable[[T], Any] | None = None) -> list[T]:
    """The values by their figures, the smallest first; those that are not finite last, in the order they came in.

    >>> ascending([math.nan, 3, -math.inf, 1])
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
