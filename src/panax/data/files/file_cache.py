"""Size-bounded cache of object-store files, shared by processes; the least recently used copy is removed
first.

A copy appears complete or not at all: it is written under a hidden name, flushed and renamed. A reader holds a
shared lock on its copy and a remover an exclusive lock, so no copy in use is removed. A copy being written is
locked too, and counts with its full size from the start. Locks end with their process, so a killed process
leaves none behind.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from panax.core.errors import DataError, StoreError
from panax.system.lock import acquire
from panax.system.owned_dir import OWNER_MARKER, make_owned_dir

from .cache import cache_directory

DEFAULT_GB = 50.0
CROWDED_ENTRIES = 1000
"""With more copies than this, more are removed than necessary, so that the next ones find room without a
search."""

_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05
_LOCK = ".lock"
_PARTIAL = ".partial"


class CacheFullError(DataError):
    """The files in use fill the cache; there may be room later, when they are no longer in use."""


class FileCache:
    """Directory of copies.

    Attributes:
        root: The directory, created if missing.
        limit_bytes: Maximum size of all copies together.
    """

    def __init__(self, root: Path, limit_bytes: int, *, wait_seconds: float = _WAIT_SECONDS) -> None:
        """Use `root`.

        Args:
            wait_seconds: How long to wait for room while all copies are in use.
        """
        self.root = root
        self.limit_bytes = limit_bytes
        self._wait_seconds = wait_seconds

    @classmethod
    def default(cls, *, wait: bool = True) -> "FileCache":
        """Return the cache `panax-files` in the cache directory, of at most $PANAX_CACHE_GB (10^9 bytes each;
        50 if not set).

        Args:
            wait: True to wait for room.

        Raises:
            DataError: $PANAX_CACHE_GB is not a number above 0.
        """
        given = os.environ.get("PANAX_CACHE_GB", "")
        try:
            limit = float(given or DEFAULT_GB) * 1e9
        except ValueError:
            limit = 0.0
        if not 0 < limit < float("inf"):
            raise DataError(f"PANAX_CACHE_GB={given}; expected a number above 0, the most GB of files to keep")
        return cls(cache_directory() / "panax-files", int(limit), wait_seconds=_WAIT_SECONDS if wait else 0.0)

    @contextlib.contextmanager
    def lease(self, key: str, size: int, fill: Callable[[int], None], name: str) -> Iterator[Path]:
        """Yield the path of a copy, which exists as long as the block lasts.

        Args:
            key: The copy's file name; it must identify everything that determines the content.
            size: Size of the copy in bytes.
            fill: Writes the copy into an open file descriptor, if it does not exist yet.
            name: The file's name for error messages.

        Raises:
            CacheFullError: The copy does not fit in the cache with the files in use.
            DataError: The copy is larger than the cache, or the directory can't be written or locked. `fill` may
                raise other errors.
        """
        descriptor = self._pin(key, size, fill, name)
        try:
            yield self.root / key
        finally:
            with contextlib.suppress(OSError):
                os.utime(descriptor)  # time of last use
            os.close(descriptor)

    def _pin(self, key: str, size: int, fill: Callable[[int], None], name: str) -> int:
        """Return a descriptor of the copy with a shared lock on it."""
        if size > self.limit_bytes:
            raise DataError(
                f"{name} has {size:,} bytes; the cache of files holds {self.limit_bytes:,}: raise PANAX_CACHE_GB"
            )
        try:
            make_owned_dir(self.root)
            while True:
                if (descriptor := _lock_existing(self.root / key, shared=True)) is not None:
                    os.utime(descriptor)
                    return descriptor
                if not (self.root / key).exists():
                    self._try_to_make(key, size, fill, name)
                time.sleep(0 if (self.root / key).exists() else _POLL_SECONDS)
        except StoreError:
            raise
        except OSError as error:
            raise DataError(
                f"the cache {self.root} can't be written: {error}; free space there, or name another directory, on a "
                "file system that can lock, with $PANAX_CACHE"
            ) from error

    def _try_to_make(self, key: str, size: int, fill: Callable[[int], None], name: str) -> None:
        """Write the copy, unless another process is writing it."""
        partial = self.root / f".{key}{_PARTIAL}"
        with contextlib.suppress(FileExistsError):
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        descriptor = _lock_existing(partial, shared=False)
        if descriptor is None:
            return
        try:
            if not (self.root / key).exists():
                self._reserve(descriptor, size, name)
                fill(descriptor)
                os.fsync(descriptor)
                with self._lock_directory():  # a directory listed meanwhile may show neither name
                    partial.rename(self.root / key)
        finally:
            with contextlib.suppress(FileNotFoundError):
                partial.unlink()
            os.close(descriptor)

    def _reserve(self, descriptor: int, size: int, name: str) -> None:
        """Make room, and set the file's size, so that it counts toward the limit."""
        end = time.monotonic() + self._wait_seconds
        while not self._make_room(descriptor, size):
            if time.monotonic() >= end:
                raise CacheFullError(
                    f"{name} has {size:,} bytes, for which there is no room: the cache of files holds "
                    f"{self.limit_bytes:,}, and all of its files are in use; raise PANAX_CACHE_GB"
                )
            time.sleep(_POLL_SECONDS)

    def _make_room(self, descriptor: int, size: int) -> bool:
        with self._lock_directory() as lock:
            # Upper bound on the size of all copies. It can be too high if some were removed by hand; then
            # they are counted again.
            known = os.pread(lock, 32, 0)
            used_bytes = int(known) if known.strip().isdigit() else self.limit_bytes
            if used_bytes + size > self.limit_bytes:
                used_bytes = self._clear(size)
            if used_bytes + size > self.limit_bytes:
                return False
            os.pwrite(lock, b"%-32d" % (used_bytes + size), 0)
            os.truncate(descriptor, size)
            return True

    def _clear(self, size: int) -> int:
        """Remove the least recently used copies until there is room; return the size of the remaining ones in
        bytes."""
        copies = []
        for entry in os.scandir(self.root):
            if entry.name not in (_LOCK, OWNER_MARKER) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    # Partial copies of killed processes go first.
                    age = 0 if entry.name.endswith(_PARTIAL) else status.st_mtime_ns
                    copies.append((age, entry.path, status.st_size))
        used_bytes = sum(each for _, _, each in copies)
        max_bytes = self.limit_bytes - size
        goal = max_bytes - (self.limit_bytes // 20 if len(copies) > CROWDED_ENTRIES else 0)
        for _, path, each in sorted(copies):
            if used_bytes <= goal:
                break
            descriptor = _lock_existing(Path(path), shared=False)
            if descriptor is not None:
                os.unlink(path)
                os.close(descriptor)
                used_bytes -= each
        return used_bytes

    @contextlib.contextmanager
    def _lock_directory(self) -> Iterator[int]:
        """Hold the lock of the directory, under which files get their sizes and names."""
        lock = os.open(self.root / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            acquire(lock, wait=True)
            yield lock
        finally:
            os.close(lock)


def _lock_existing(path: Path, *, shared: bool) -> int | None:
    """Return a locked descriptor of a file; None if the file does not exist, or another process holds the
    lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        # Between the two calls it may have been removed, and perhaps made again.
        if acquire(descriptor, shared=shared) and os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
