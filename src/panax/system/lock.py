"""Locks of files among processes: they end with the process that holds them."""

import errno
import json
import os
import socket
from pathlib import Path
from typing import IO, Any

import psutil

from . import json_reader

SAME_SECONDS = 1.0
"""Tolerance of start times: two processes with one id did not start within a time this short."""


def open_locked(path: str | Path) -> IO[bytes]:
    """Open a file, created if missing, and lock it until it is closed. Its content is not changed.

    Raises:
        BlockingIOError: Another process has locked it.
        OSError: The file can't be opened for writing, or is a link.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    file = os.fdopen(descriptor, "r+b", buffering=0)
    try:
        if not acquire(file):
            raise BlockingIOError(errno.EWOULDBLOCK, "another process has locked it", str(path))
    except BaseException:
        file.close()
        raise
    return file


def acquire(file: int | IO[Any], *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file until it is closed; return False if another process holds a lock that excludes this
    one.

    Args:
        shared: True for a lock that several processes may hold.
        wait: True to wait until the lock is free.

    Raises:
        OSError: The file system or the system has no locks.
    """
    try:
        import fcntl
    except ImportError:  # Windows, where `check_platform` ends a run first.
        raise OSError(errno.ENOSYS, "the system has no file locks") from None
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def is_locked(path: str | Path) -> bool:
    """Return True if a process on this host has locked a file exclusively."""
    try:
        with open(path, "rb") as file:
            # Shared, for the moment of the test: two readers don't block each other.
            return not acquire(file, shared=True)
    except OSError:
        return False


def describe_owner() -> str:
    """Return a description of this process for a file that it locks: its id, its start time, and its host."""
    return json.dumps({"pid": os.getpid(), "began": psutil.Process().create_time(), "host": socket.gethostname()})


def signal_owner(path: str | Path, number: int) -> str:
    """Signal the process that holds a lock file; return the reason if that is not possible, else an empty
    text.

    The file may be stale: a later process with the same id is a different one and is not signaled. A file of
    another user causes no signal at all.
    """
    try:
        if os.lstat(path).st_uid != os.geteuid():
            return "the run is another user's"
        content = json_reader.read(Path(path))
        pid, began, host = int(content["pid"]), float(content["began"]), str(content["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return "the run does not give its process"
    if host != socket.gethostname():
        return f"it runs on {host}; stop it there"
    try:
        process = psutil.Process(pid)
        if abs(process.create_time() - began) > SAME_SECONDS:
            return "its process has ended"
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return "its process has ended"
    except psutil.AccessDenied:
        return f"process {pid} is another user's"
    return ""
