"""Reward functions for common records: a number, a text, or an expression that the answer must match."""

import re
import unicodedata
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

# A sign, digits with or without commas between thousands, decimals, an exponent. Not a part of a word, as the 2 of CO2; a sign
# after one is a hyphen or a difference.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"(?<![\w.])(?P<sign>[-+\u2212])?(?P<digits>{_DIGITS})(?:[eE](?P<exponent>[-+]?[0-9]+))?"
    rf"(?:/(?P<divisor>[0-9]+)(?![.,]?[0-9]))?"
)
_MAX_DIGITS, _MAX_EXPONENT = 1000, 400


def number_equals(answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the last number in the answer equals `record["answer"]`, 0 otherwise.

    Numbers are compared exactly, not as floats: `1,250`, `1250.0`, `+1.25e3` and `2500/2` are equal. An answer
    without a number has the reward 0.

    Args:
        record: `answer` is a number, or a text, of which the last number counts.

    Raises:
        ValueError: The record has no number as its answer.

    >>> [number_equals("3 + 4 = 7.", {"answer": 7}), number_equals("7, or 8", {"answer": "#### 7"})]
    [1.0, 0.0]
    """
    expected = record_field(record, "answer")
    number = find_last_number(str(expected)) if isinstance(expected, int | float | str) else None
    if number is None or isinstance(expected, bool):
        raise ValueError(f"the record's answer is {expected!r:.80}; expected a number, or a text with one")
    return float(find_last_number(answer) == number)


def find_last_number(text: str) -> Fraction | None:
    """Return the last number of a text, exactly; None if there is none, or it is longer than 1,000 digits.

    >>> find_last_number("between -1.5 and \u22122,000")
    Fraction(-2000, 1)
    """
    last = None
    for last in _NUMBER.finditer(text):  # noqa: B007
        pass
    if last is None:
        return None
    digits, exponent, divisor = last["digits"].replace(",", ""), last["exponent"] or "0", last["divisor"] or "1"
    if max(map(len, (digits, divisor))) > _MAX_DIGITS or len(exponent) > 8 or abs(int(exponent)) > _MAX_EXPONENT:
        return None
    if not int(divisor):
        return None
    value = Fraction(digits) * Fraction(10) ** int(exponent) / int(divisor)
    return -value if last["sign"] in ("-", "\u2212") else value


def text_equals(answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the answer equals `record["answer"]`, 0 otherwise.

    White space at both ends is ignored, any other counts as one space, and Unicode characters with several
    spellings are equal. Upper and lower case differ.

    Raises:
        ValueError: The record has no text as its answer.

    >>> text_equals(" a\\n b", {"answer": "a b"})
    1.0
    """
    expected = record_field(record, "answer")
    if not isinstance(expected, str):
        raise ValueError(f"the record's answer is {expected!r:.80}; expected a text")
    return float(_normalize(answer) == _normalize(expected))


def matches(answer: str, record: Mapping[str, Any]) -> float:
    r"""Return 1 if the regular expression `record["pattern"]` is found in the answer, 0 otherwise.

    An expression that backtracks without end is ended by the reward's time limit.

    Args:
        record: `pattern` is an expression of Python's `re`; `^` and `$` are the ends of the answer, and `.` is any
            character but the end of a line.

    Raises:
        ValueError: The record has no valid expression.

    >>> matches("<answer>12</answer>", {"pattern": r"^<answer>\d+</answer>$"})
    1.0
    """
    pattern = record_field(record, "pattern")
    if not isinstance(pattern, str):
        raise ValueError(f"the record's pattern is {pattern!r:.80}; expected a text")
    try:
        expression = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the record's pattern {pattern!r:.80} is not a regular expression: {error}") from None
    return float(expression.search(answer) is not None)


def record_field(record: Mapping[str, Any], name: str) -> Any:
    """Return a field of a prompt's record.

    Raises:
        ValueError: The record does not have it.
    """
    if name not in record:
        raise ValueError(
            f"the record has no field {name!r}, which this reward reads; its fields: {', '.join(map(str, record))}"
        )
    return record[name]


def _normalize(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())
