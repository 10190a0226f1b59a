"""How fast a folder or a store takes bytes, and gives them back. What is written is removed again, and nothing else is."""

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
"""Written first: where that is slow, no more is."""

LARGEST_BYTES = 64 * 2**20
"""The most that one host writes to a place at a time, and in all together with the first file."""

_SLOW_SECONDS = 0.4

_PREFIX = "panax-check-"


@dataclasses.dataclass(frozen=True)
class DiskFigures:
    """Of one place as one process measured it; bytes a second."""

    place: str
    written_bytes: int
    write_bandwidth: float
    read_bandwidth: float


def measure_disk(place: str) -> DiskFigures:
    """Write a file durably, read it, and remove it: 4 MiB, then 64 MiB where that went fast.

    Args:
        place: A folder, or a store's address. Of a folder that is not there, the nearest one above it that is.

    Raises:
        StoreError: It can't be written or read.
    """
    address = place if "://" in place else str(_existing(expand_user(place)))
    store = open_store(address)
    figures = _written_and_read(store, place, FIRST_BYTES)
    if FIRST_BYTES / figures.write_bandwidth + FIRST_BYTES / figures.read_bandwidth > _SLOW_SECONDS:
        return figures
    return _written_and_read(store, place, LARGEST_BYTES)


def _written_and_read(store: Store, place: str, size: int) -> DiskFigures:
    # A name that nobody else has chosen. Bytes that nothing can compress, in whole pages, as checkpoints are written.
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
        # The error that ended it says more than one of removing what may not be there.
        with contextlib.suppress(StoreError):
            store.delete([path])
        raise
    store.delete([path])
    return DiskFigures(place, size, size / written, size / read)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there: the same disk, on which it would be made."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def _forget(store: Store, path: str) -> None:
    """Have the system forget its copy of a file in memory, so that the disk is read; where it can't, memory is what is read."""
    file = expand_user(store.url) / path
    if not is_remote(store.url) and hasattr(os, "posix_fadvise"):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
