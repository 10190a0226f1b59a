"""A folder of compiled programs: each in its own file with its checksum, together not larger than a bound.

Processes of one user share it, also from several hosts: a file appears whole, by a rename, and removing one that another
process reads is harmless. A file that is not what was written is removed and taken for missing: a damaged program is never run.
"""

import contextlib
import hashlib
import os
import tempfile
import time
from pathlib import Path

from ..system.secure_dir import make_private_folder

_ENDING = ".program"
_HEAD = b"panax program 1\n"
_DIGEST = hashlib.sha256().digest_size
_KEPT_AFTER_REMOVING = 0.9
_STALE_SECONDS = 3600.0


class ProgramFiles:
    """Programs by name, for one kind of processor and one set of versions.

    Attributes:
        root: The folder of all kinds, which the bound holds for.
        damaged: How many files were removed because they were not what was written.
    """

    def __init__(self, root: Path, kind: str, max_bytes: int):
        """
        Args:
            kind: What a program must have been compiled for and by, to be run here.

        Raises:
            OSError: The folder can't be made or written, or is not this user's alone.
        """
        self.root, self.kind, self.max_bytes = make_private_folder(root), kind, max_bytes
        self.folder = make_private_folder(self.root / hashlib.sha256(kind.encode()).hexdigest()[:16])
        self.damaged = 0
        self._bytes: int | None = None
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{self.folder} can't be written")

    def has(self, name: str) -> bool:
        """Whether there is a file of a program, whole or not."""
        return self._path(name).exists()

    def get(self, name: str) -> bytes | None:
        """A program; None where there is none, or none that is whole."""
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
        # Which files were used last; where that can't be written, they are older.
        with contextlib.suppress(OSError):
            os.utime(path)
        return program

    def put(self, name: str, program: bytes) -> None:
        """Keep a program, removing those that were not used for the longest time where there is no room.

        Raises:
            OSError: It can't be written.
        """
        data = _HEAD + self._digest(name, program) + program
        if len(data) > self.max_bytes:
            return
        if self._bytes is None or self._bytes + len(data) > self.max_bytes:
            self._bytes = self._make_room(len(data))
        with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.replace(file.name, self._path(name))
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        self._bytes += len(data)

    def remove(self, name: str) -> None:
        """Forget a program."""
        with contextlib.suppress(FileNotFoundError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self.folder / (hashlib.sha256(name.encode()).hexdigest() + _ENDING)

    def _digest(self, name: str, program: bytes) -> bytes:
        # With what it is for: a file that was renamed is not taken for another.
        return hashlib.sha256("\n".join((self.kind, name, "")).encode() + program).digest()

    def _make_room(self, size: int) -> int:
        """Remove what is too much; how many bytes are left."""
        found: list[tuple[float, int, Path]] = []
        for path in self.root.glob("*/*"):
            with contextlib.suppress(OSError):
                state = path.lstat()
                if path.suffix == _ENDING:
                    found.append((state.st_mtime, state.st_size, path))
                elif path.suffix == ".part" and state.st_mtime < time.time() - _STALE_SECONDS:
                    path.unlink()
        total = sum(length for _, length, _ in found)
        if total + size > self.max_bytes:
            for _, length, path in sorted(found):
                if total + size <= _KEPT_AFTER_REMOVING * self.max_bytes:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                total -= length
        return total
