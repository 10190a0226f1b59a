"""Sanitization of external text for display, without sequences that a terminal or a page would interpret."""

import re

_COLORS = re.compile(r"\x1b\[[0-9;]*m")

_OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators other than newline, bidirectional controls and surrogates.

Letters of all scripts stay.
"""


def make_printable(text: str) -> str:
    """Return text with its newlines and tabs, without color codes, and with other control characters escaped.

    >>> print(make_printable("\\x1b[31mred\\x1b[0m \\x1b[2Jend"))
    red \\x1b[2Jend
    >>> print(make_printable("un\\u00a0mot\\r"))
    un\u00a0mot\\r
    """
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], _COLORS.sub("", text))
