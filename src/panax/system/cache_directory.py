"""Paths of Panax's caches."""

import os
import tempfile
from pathlib import Path

from .files import expand_user
from .secure_dir import make_private_folder


def cache_directory(folder: str | None = None) -> Path:
    """Return the folder for cached results: `folder`, else $PANAX_CACHE, else `panax` in this user's caches.

    >>> cache_directory("/tmp/here").as_posix()
    '/tmp/here'
    """
    if folder is not None:
        return expand_user(folder)
    if named := os.environ.get("PANAX_CACHE"):
        return expand_user(named)
    return user_caches() / "panax"


def user_caches() -> Path:
    """Return the folder of all caches of this user: $XDG_CACHE_HOME, else ~/.cache; a temporary one for a
    user without a home.

    In a container that runs under a user id without a name, `~` stays `~`, which would be a folder of that
    name in the current folder.

    Raises:
        PermissionError: The temporary folder belongs to another user.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    home = expand_user("~")
    if home.is_absolute():
        return home / ".cache"
    # Others may write to its parent folder.
    return make_private_folder(Path(tempfile.gettempdir()) / f"caches-of-{os.getuid()}")
