"""Values of a categorical column: the text of a category, and the number in a text.

The rule is defined here only: tables, bags, sequences and images must agree on which values are one category.
"""

import decimal
import math
import re
from typing import Any

import numpy as np

from ..files.files import BadRecordError

_LARGEST_WHOLE = 2**64
"""Limit up to which a float or decimal stands for its whole number: beyond, digits would be invented."""

_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
_WHOLE = re.compile(r"\s*\+?(\d+)(\.0*)?\s*", re.ASCII)
_INTEGER, _DECIMAL = re.compile(r"-?\d+", re.ASCII), re.compile(r"-?\d+\.0+", re.ASCII)


def category_text(value: Any, column: str, where: str) -> str:
    """Return the text of a category, by which it is hashed, counted or named.

    A whole number of any type has the text of that integer, since a column of integers becomes one of floats
    if a value is missing: `3`, `3.0` and `Decimal("3.00")` are one category. Text is not changed.

    Raises:
        BadRecordError: The value is not Unicode, or is a list, a mapping or the like.

    >>> [category_text(value, "c", "row 1") for value in (3, 3.0, decimal.Decimal("3.00"), np.int8(3), 0.5, "3.0", True)]
    ['3', '3', '3', '3', '0.5', '3.0', 'True']
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise BadRecordError(where, f"column {column!r} holds {value!r}, which is not UTF-8; convert it") from None
    if isinstance(value, list | tuple | dict | set | np.ndarray):
        kind = type(value).__name__
        raise BadRecordError(where, f"column {column!r} holds a {kind}; expected one value: a number or a text")
    if isinstance(value, float | decimal.Decimal) and -_LARGEST_WHOLE < value < _LARGEST_WHOLE and value == int(value):
        return str(int(value))
    text = str(value)
    if not is_unicode(text):
        raise BadRecordError(where, f"column {column!r} holds {value!r}, which is not UTF-8; convert it")
    return text


def is_unicode(text: str) -> bool:
    """Return True if a text has no surrogates, which stand for bytes that are not UTF-8."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def is_empty(value: Any) -> bool:
    """Return True if a value is missing."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or value == "" or (isinstance(value, decimal.Decimal) and value.is_nan())


def parse_number(value: Any) -> float:
    """Convert a value to a float; NaN if it is not a number. Text may have the formats of data files, but not
    Python's `1_000`.

    >>> [parse_number(value) for value in ("1e3", " 2 ", 7, "1_000", "\\u0663", None)]
    [1000.0, 2.0, 7.0, nan, nan, nan]
    """
    if isinstance(value, str | bytes):
        text = value if isinstance(value, str) else value.decode("ascii", "replace")
        return float(text) if _NUMBER.fullmatch(text) else math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def parse_id(value: Any) -> int:
    """Convert a value to a whole number from 0 on; -1 if it is not one.

    >>> [parse_id(value) for value in ("7", "7.0", 7.0, "1_0", 0.5, -2)]
    [7, 7, 7, -1, -1, -1]
    """
    if isinstance(value, str):
        match = _WHOLE.fullmatch(value)
        return int(match[1]) if match and len(match[1]) < 20 else -1
    try:
        number = int(value)
        return number if number == value and number >= 0 else -1
    except (TypeError, ValueError, OverflowError):
        return -1


class NumberFormats:
    """Detector of whole numbers in two spellings: `3` in one row and `3.0` in another are two categories as
    text.

    Attributes:
        integer: The first text without a decimal point; None if there is none.
        decimal: The first text with a decimal point and only zeros after it; None if there is none.
    """

    def __init__(self) -> None:
        self.integer: str | None = None
        self.decimal: str | None = None

    def add(self, value: Any) -> None:
        """Record a value; numbers that are not text have one spelling."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.integer = self.integer or str(value)
        elif isinstance(value, str) and value[-1:].isdigit():
            if self.integer is None and _INTEGER.fullmatch(value):
                self.integer = value
            elif self.decimal is None and value[-1] == "0" and _DECIMAL.fullmatch(value):
                self.decimal = value

    def note(self, column: str) -> str | None:
        """Return a note for the user; None if there is only one spelling."""
        if self.integer is None or self.decimal is None:
            return None
        return (
            f"column {column!r} writes whole numbers in two ways, as {self.integer} and as {self.decimal!r}: as text these are "
            f"different categories; write them in one way if they are meant to be the same"
        )
