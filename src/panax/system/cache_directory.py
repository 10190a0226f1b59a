"""Where Panax keeps finished work."""

import os
from pathlib import Path

from .files import expanded


def cache_directory(given: str | None = None) -> Path:
    """Where to keep finished work: `given`, else $PANAX_CACHE, else `panax` in $XDG_CACHE_HOME or ~/.cache.

    >>> cache_directory("/tmp/here").as_posix()
    '/tmp/here'
    """
    if given is not None:
        return expanded(given)
    if named := os.environ.get("PANAX_CACHE"):
        return expanded(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else expanded("~") / ".cache") / "panax"
