"""Text of others as a person may see it: without what a terminal or a page would obey."""

import re

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

_OBEYED = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls, breaks of lines beside the newline, directions of writing, and halves of characters; letters of all scripts stay."""


def printable(text: str) -> str:
    """Text with its line breaks and tabs, without colours, and with other control characters as their codes.

    >>> print(printable("\\x1b[31mred\\x1b[0m \\x1b[2Jend"))
    red \\x1b[2Jend
    >>> print(printable("un\\u00a0mot\\r"))
    un\u00a0mot\\r
    """
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], _COLOURS.sub("", text))
