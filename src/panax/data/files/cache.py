"""Directory of finished results, shared by processes: each entry appears complete or not at all.

An entry is built under a temporary name and renamed. If the file system supports locks, one process builds
while the others wait; otherwise several may build the same entry, and the first to finish wins. An entry that
its reader rejects (truncated by a full disk, for example) is built again.
"""

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from panax.core.errors import DataError
from panax.system.cache_directory import cache_directory as cache_directory

from ...system.files import discard_folder
from ...system.lock import acquire

Entry = TypeVar("Entry")


def read_or_build(root: Path, name: str, *, build: Callable[[Path], None], read: Callable[[Path], Entry]) -> Entry:
    """Read the entry `name` under `root`; build it first if it is missing or damaged.

    Args:
        root: The cache directory, created if missing.
        name: Name of the entry; it must identify everything that determines its content.
        build: Fills the empty directory that is passed to it.
        read: Reads a finished entry; a `DataError` from it means that the entry is damaged.

    Raises:
        DataError: `build` raised it, or the directory can't be written.
    """
    final = root / name
    if (entry := _try_read(final, read)) is not None:
        return entry
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock") as alone:
            if alone:
                for leftover in root.glob(f".{name}.*.partial"):
                    discard_folder(leftover)
            if (entry := _try_read(final, read)) is not None:
                return entry
            partial = root / f".{name}.{uuid.uuid4().hex}.partial"
            partial.mkdir()
            try:
                build(partial)
                return _publish(partial, final, read)
            finally:
                discard_folder(partial)
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(root):
            raise  # the work itself failed, not the cache
        message = f"the cache {root} can't be written: {error}; free space there, or name another directory"
        raise DataError(f"{message} with $PANAX_CACHE or cache_dir=") from error


def _try_read(final: Path, read: Callable[[Path], Entry]) -> Entry | None:
    if not final.is_dir():
        return None
    with contextlib.suppress(DataError):
        return read(final)
    return None


def _publish(partial: Path, final: Path, read: Callable[[Path], Entry]) -> Entry:
    for _ in range(10):
        try:
            partial.rename(final)
        except OSError:
            if not final.is_dir():
                raise
            if (entry := _try_read(final, read)) is not None:
                return entry  # another process was faster
            damaged = partial.with_name(f".{final.name}.{uuid.uuid4().hex}.partial")
            with contextlib.suppress(FileNotFoundError):
                final.rename(damaged)
            discard_folder(damaged)
        else:
            return read(final)
    raise DataError(f"{final} is replaced by a damaged copy again and again; remove it and try again")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold an advisory lock; yield True if it is held."""
    # Not through a link, which could lead to another user's file.
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+b") as file:
        try:
            held = acquire(file, wait=True)
        except OSError:  # some network file systems have no locks; renaming alone guarantees complete entries there
            held = False
        yield held
