"""Limits on the size of decoded data, checked before memory is allocated: a few bytes can expand to
terabytes."""

from typing import Any

from panax.core.errors import RecipeError

MAX_RECORD_BYTES = 2**26
"""Default limit of one record (a line, a row's values, a sample's files), decompressed: 64 MiB."""


def describe_oversize(
    size: int, limit: int, setting: str = "max_record_bytes", *, at_least: bool = False, unit: str = "bytes"
) -> str:
    """Return the error message for a size that exceeds its limit.

    Args:
        at_least: True if the real size may be larger than `size`, because reading stopped there.

    >>> describe_oversize(20, 10)
    '20 bytes; expected at most max_record_bytes=10: raise that setting if this size is right'
    """
    found = f"{size:,} {unit} or more" if at_least else f"{size:,} {unit}"
    return f"{found}; expected at most {setting}={limit}: raise that setting if this size is right"


def check_positive(corpus: Any, *settings: str) -> None:
    """Raise a RecipeError if one of these settings is not a whole number of at least 1."""
    for name in settings:
        value = getattr(corpus, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RecipeError(f"{name}={value!r}; expected a whole number of at least 1, in bytes")
