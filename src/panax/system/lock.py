"""A file that one process holds at a time."""

import os
from pathlib import Path
from typing import IO


def locked(path: str | Path) -> IO[bytes]:
    """Open a file, made where it is missing, and lock it until it is closed. What it holds is left as it is.

    Raises:
        BlockingIOError: Another process has locked it.
        OSError: It can't be opened for writing, or is a link.
    """
    import fcntl  # Absent on Windows, where `check_system` ends a run first.

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    file = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file
