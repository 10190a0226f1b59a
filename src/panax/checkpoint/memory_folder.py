"""Location of a run's copies in a host's memory. Only folders that Panax has created and marked are removed.

/dev/shm/panax-1000/            `checkpoint.memory.directory`: any other contents are left alone
    panax-copies-1000/          accessible to this user alone (mode 0700)
        0123456789abcdef/       one run's
            panax-copies        the marker: created first, locked while a job uses the folder
            step_00000100/...
"""

import contextlib
import os
import re
import time
from pathlib import Path
from typing import IO

from ..core.errors import CheckpointError
from ..system import lock
from ..system.files import discard_folder
from ..system.secure_dir import is_own_file, is_own_folder, make_private_folder

STALE_SECONDS = 24 * 3600.0
"""Age at which copies of a run that no job uses are considered abandoned by a job that was never
restarted."""

OWNER_MARKER = "panax-copies"
_TEXT = "Panax keeps copies of a run's state here, and removes this folder when they are a day old.\n"
_RUN = re.compile("[0-9a-f]{16}")


class MemoryFolder:
    """The folder of one run's copies. It is created, marked, and locked by all processes of the job on this
    host together.

    Attributes:
        path: The folder.
    """

    def __init__(self, directory: Path, run: str) -> None:
        """
        Raises:
            CheckpointError: The folder can't be created, is a link or another user's, or others may write to it.
        """
        try:
            if directory.is_symlink():
                raise PermissionError(f"{directory} is a link to {os.readlink(directory)}; expected a folder")
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            copies = make_private_folder(directory / f"panax-copies-{os.geteuid()}")
            _remove_stale(copies, run)
            self.path = make_private_folder(copies / run)
            self._mark = _open_marker(self.path)
        except OSError as error:
            raise CheckpointError(
                f"copies can't be kept in memory in {directory}: {error}; name another folder with $PANAX_MEMORY"
            ) from error

    def check(self) -> None:
        """Check that the folder is still the one that this job created, before files in it are removed.

        Raises:
            CheckpointError: The folder has been replaced.
        """
        if not (is_own_folder(self.path) and is_own_file(self.path / OWNER_MARKER)):
            raise CheckpointError(
                f"{self.path} is not the folder that this job made for its copies any more; nothing in it is removed. "
                f"Find out who changed it, or name another folder with $PANAX_MEMORY"
            )

    def remove(self) -> None:
        """Remove the folder: the store has a newer state. A later job removes any remains."""
        if is_own_folder(self.path) and is_own_file(self.path / OWNER_MARKER):
            discard_folder(self.path)

    def close(self) -> None:
        """Release the lock."""
        self._mark.close()


def _open_marker(folder: Path) -> IO[str]:
    """Open the folder's marker, created if it is missing, under a lock that several processes of a job
    share."""
    mark = folder / OWNER_MARKER
    if not mark.exists() and any(folder.iterdir()):
        raise PermissionError(f"{folder} was not made by Panax: {OWNER_MARKER} is missing in it")
    descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    file = os.fdopen(descriptor, "r+", encoding="utf-8")
    try:
        if not is_own_file(mark):
            raise PermissionError(f"{mark} is not a file that only this user may write to")
        if not file.read(1):
            file.write(_TEXT)
            file.flush()
        # Only `_remove_stale` locks it exclusively, for a moment, and never waits.
        lock.acquire(file, shared=True, wait=True)
    except BaseException:
        file.close()
        raise
    return file


def _remove_stale(copies: Path, run: str) -> None:
    """Remove the marked folders of runs that no job uses and that have not changed for a day."""
    for path in copies.iterdir():
        mark = path / OWNER_MARKER
        if path.name == run or not _RUN.fullmatch(path.name) or not is_own_folder(path) or not is_own_file(mark):
            continue
        # Another job may remove it at the same time.
        with contextlib.suppress(FileNotFoundError), open(mark, encoding="utf-8") as file:
            newest = max(os.lstat(entry).st_mtime for entry in (path, *path.rglob("*")))
            if file.read() != _TEXT or time.time() - newest <= STALE_SECONDS:
                continue
            if lock.acquire(file):  # Otherwise a job uses it.
                discard_folder(path)
