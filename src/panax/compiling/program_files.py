"""Folder of compiled programs: each in a separate file with its checksum, with a bound on their total size.

Processes of one user share the folder, also from several hosts: a file appears complete, by a rename, and
removing a file that another process reads is harmless. A file with changed content is removed and counts as
missing: a damaged program is never run.
"""

import contextlib
import hashlib
import os
import time
from pathlib import Path

from ..system.replacement import PARTIAL_ENDING, replace_file
from ..system.secure_dir import make_private_folder

_ENDING = ".program"
_HEAD = b"panax program 1\n"
_DIGEST = hashlib.sha256().digest_size
_KEPT_AFTER_REMOVING = 0.9
_STALE_SECONDS = 3600.0


class ProgramFiles:
    """Programs by name, for one kind of processor and one set of versions.

    Attributes:
        root: The folder of all kinds, to which the bound applies.
        damaged: Number of files removed because their content had changed.
    """

    def __init__(self, root: Path, kind: str, max_bytes: int):
        """Open the folder, or create it.

        Args:
            kind: Target and versions for which a program must have been compiled to be run here.

        Raises:
            OSError: The folder can't be created or written, or does not belong to this user alone.
        """
        self.root, self.kind, self.max_bytes = make_private_folder(root), kind, max_bytes
        self.folder = make_private_folder(self.root / hashlib.sha256(kind.encode()).hexdigest()[:16])
        self.damaged = 0
        self._bytes: int | None = None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{self.folder} can't be written")

    def has(self, name: str) -> bool:
        """Return True if there is a file of a program, complete or not."""
        return self._path(name).exists()

    def get(self, name: str) -> bytes | None:
        """Read a program; None if it is missing or damaged."""
        path = self._path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        head = len(_HEAD) + _DIGEST
        program = data[head:]
        if data[:head] != _HEAD + self._digest(name, program):
            self.damaged += 1
            self.remove(name)
            return None
        # For the order of last use; if it can't be written, the files count as older.
        with contextlib.suppress(OSError):
            os.utime(path)
        return program

    def put(self, name: str, program: bytes) -> None:
        """Store a program; if there is not enough space, the least recently used ones are removed.

        Raises:
            OSError: The file can't be written.
        """
        data = _HEAD + self._digest(name, program) + program
        if len(data) > self.max_bytes:
            return
        if self._bytes is None or self._bytes + len(data) > self.max_bytes:
            self._bytes = self._make_room(len(data))
        replace_file(self._path(name), data, private=True)
        self._bytes += len(data)

    def remove(self, name: str) -> None:
        """Remove a program."""
        with contextlib.suppress(FileNotFoundError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self.folder / (hashlib.sha256(name.encode()).hexdigest() + _ENDING)

    def _digest(self, name: str, program: bytes) -> bytes:
        # Includes the name: a renamed file is not taken for another program.
        return hashlib.sha256("\n".join((self.kind, name, "")).encode() + program).digest()

    def _make_room(self, size: int) -> int:
        """Remove the least recently used programs to fit the bound; return the number of remaining bytes."""
        programs: list[tuple[float, int, Path]] = []
        for path in self.root.glob("*/*"):
            with contextlib.suppress(OSError):
                state = path.lstat()
                if path.suffix == _ENDING:
                    programs.append((state.st_mtime, state.st_size, path))
                elif path.suffix == PARTIAL_ENDING and state.st_mtime < time.time() - _STALE_SECONDS:
                    path.unlink()
        total = sum(length for _, length, _ in programs)
        if total + size > self.max_bytes:
            for _, length, path in sorted(programs):
                if total + size <= _KEPT_AFTER_REMOVING * self.max_bytes:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                total -= length
        return total
