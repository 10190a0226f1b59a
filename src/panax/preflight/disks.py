"""Write and read speed of a folder or a store. Only files that the measurement writes are removed."""

import contextlib
import dataclasses
import mmap
import os
import time
import uuid
from pathlib import Path

from ..core.errors import StoreError
from ..stores import Store, is_remote, open_store
from ..system.files import expand_user

FIRST_BYTES = 4 * 2**20
"""Size of the first file: if that is slow, no more is written."""

LARGEST_BYTES = 64 * 2**20
"""Maximum that one host writes to a location at a time; with the first file, the total."""

_SLOW_SECONDS = 0.4

_PREFIX = "panax-check-"


@dataclasses.dataclass(frozen=True)
class DiskFigures:
    """Figures of one location as one process measured them, in bytes per second."""

    place: str
    written_bytes: int
    write_bandwidth: float
    read_bandwidth: float


def measure_disk(place: str) -> DiskFigures:
    """Write a file durably, read it, and remove it: 4 MiB, then 64 MiB if that was fast.

    Args:
        place: A folder, or a store's address. For a folder that does not exist, its nearest existing ancestor
            is measured.

    Raises:
        StoreError: The location can't be written or read.
    """
    address = place if "://" in place else str(_existing(expand_user(place)))
    store = open_store(address)
    figures = _written_and_read(store, place, FIRST_BYTES)
    if FIRST_BYTES / figures.write_bandwidth + FIRST_BYTES / figures.read_bandwidth > _SLOW_SECONDS:
        return figures
    return _written_and_read(store, place, LARGEST_BYTES)


def _written_and_read(store: Store, place: str, size: int) -> DiskFigures:
    # A unique name. Bytes that nothing can compress, in whole pages, as checkpoints are written.
    path = f"{_PREFIX}{uuid.uuid4().hex}/bytes"
    data, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
    data.write(os.urandom(size))
    try:
        start = time.perf_counter()
        store.write(path, [memoryview(data)])
        written = time.perf_counter() - start
        _forget(store, path)
        start = time.perf_counter()
        store.read_into(path, 0, memoryview(target))
        read = time.perf_counter() - start
    except BaseException:
        # The original error is more useful than one of removing a file that may not exist.
        with contextlib.suppress(StoreError):
            store.delete([path])
        raise
    store.delete([path])
    return DiskFigures(place, size, size / written, size / read)


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists: the same disk, on which the folder would be
    created."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _forget(store: Store, path: str) -> None:
    """Drop a file from the system's page cache, so that the disk is read; if that is not possible, memory is
    read."""
    file = expand_user(store.url) / path
    if not is_remote(store.url) and hasattr(os, "posix_fadvise"):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
