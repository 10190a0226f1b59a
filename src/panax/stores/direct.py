"""Reads past the page cache: directly into page-aligned memory, otherwise through a page-aligned buffer of
each thread.

Large reads of a checkpoint are made once. Through the cache each byte is copied twice, and into pages that
are fresh: the disk gave 2.0 GB/s directly, but 0.3 through the cache into fresh memory.
"""

import errno
import mmap
import os
import threading
from pathlib import Path

import numpy as np

PAGE = 4096
MIN_DIRECT_BYTES = 2**20
"""Size below which reads and writes go through the cache."""

_BUFFER_BYTES = 2**22 + 2 * PAGE
_buffers = threading.local()


def read_direct(file: Path, start: int, target: memoryview) -> bool:
    """Fill `target` with a file's bytes from `start` on; False if that is not possible, with `target`
    undefined.

    Raises:
        OSError: The system refuses to read the file at all.
    """
    if len(target) < MIN_DIRECT_BYTES or not hasattr(os, "O_DIRECT"):
        return False
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.EINVAL:  # tmpfs, some network file systems
            return False
        raise
    try:
        if start % PAGE == 0 and len(target) % PAGE == 0 and buffer_address(target) % PAGE == 0:
            return _fill(descriptor, start, target)
        step = _BUFFER_BYTES - 2 * PAGE
        return all(
            _through_buffer(descriptor, start + done, target[done : done + step])
            for done in range(0, len(target), step)
        )
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False  # if pages are larger than here
    finally:
        os.close(descriptor)


def buffer_address(part: object) -> int:
    """Return the memory address of a buffer; 0 for an empty one."""
    array = np.frombuffer(part, np.uint8)  # type: ignore[call-overload]
    return array.ctypes.data if array.size else 0


def _through_buffer(descriptor: int, start: int, target: memoryview) -> bool:
    if not hasattr(_buffers, "memory"):
        _buffers.memory = mmap.mmap(-1, _BUFFER_BYTES)
    before = start % PAGE
    needed = before + len(target)
    window = memoryview(_buffers.memory)[: -(-needed // PAGE) * PAGE]
    if not _fill(descriptor, start - before, window, needed):
        return False
    target[:] = window[before:needed]
    return True


def _fill(descriptor: int, start: int, window: memoryview, needed: int | None = None) -> bool:
    """Read into whole pages until `needed` bytes are read; False if the file ends before."""
    needed = len(window) if needed is None else needed
    done = 0
    while done < needed:
        count = os.preadv(descriptor, [window[done:]], start + done)
        done += count
        # A count that is not a whole page is the end of the file: there is nothing to continue from.
        if count == 0 or (done < needed and count % PAGE):
            return False
    return True
