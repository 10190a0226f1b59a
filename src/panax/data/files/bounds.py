"""How large what a file holds may become, asked before memory is taken for it: a few bytes can stand for terabytes."""

from typing import Any

from panax.core.errors import RecipeError

MAX_RECORD_BYTES = 2**26
"""Of one record (a line, a row's values, a sample's files) by default, decompressed: 64 MiB."""


def describe_oversize(
    size: int, most: int, setting: str = "max_record_bytes", *, least: bool = False, unit: str = "bytes"
) -> str:
    """What is wrong with something of so many bytes, or of another unit.

    Args:
        least: Whether it may be more than `size`, which was not read to its end.

    >>> describe_oversize(20, 10)
    '20 bytes; expected at most max_record_bytes=10: raise that setting if this size is right'
    """
    found = f"{size:,} {unit} or more" if least else f"{size:,} {unit}"
    return f"{found}; expected at most {setting}={most}: raise that setting if this size is right"


def check_positive(corpus: Any, *settings: str) -> None:
    """Raise a RecipeError where one of these settings is not a whole number of at least 1."""
    for name in settings:
        value = getattr(corpus, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RecipeError(f"{name}={value!r}; expected a whole number of at least 1, in bytes")
