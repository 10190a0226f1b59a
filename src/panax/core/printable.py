"""Text of others as a person may see it: without what a terminal or a page would obey."""

import re

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str) -> str:
    """Text with its line breaks and tabs, without colours, and with other control characters as their codes.

    >>> print(printable("\\x1b[31mred\\x1b[0m \\x1b[2Jend"))
    red \\x1b[2Jend
    """
    return "".join(
        each if each.isprintable() or each in "\t\n" else ascii(each)[1:-1] for each in _COLOURS.sub("", text)
    )
