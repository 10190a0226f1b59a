"""Decoded sizes of the chunks of an ArrayRecord file, read from the chunks' headers.

ArrayRecord is based on Riegeli's record files: consecutive chunks, interrupted by a header of 24 bytes at
each 64 KiB. A chunk begins with 40 bytes: a hash of these bytes, the chunk's size, a hash of its data, its type and
number of records, and its decoded size.

Source: Riegeli/records file format.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from panax.core.errors import DataError

from ...system.binary_reader import read_number
from ..files.bounds import describe_oversize
from ..files.files import read_error

CHUNKS_PER_RECORD = 4
"""Maximum size of a chunk as a multiple of a record's: it holds several records."""

_BLOCK, _BLOCK_HEADER = 2**16, 24
_SIGNATURE = ord("s")
_CHUNK_HEADER = 40


def safe_record_count(path: Path, name: str, max_record_bytes: int, max_records: int) -> int:
    """Return how many records can be read together in little memory, at most `max_records`.

    Args:
        max_record_bytes: Maximum size of a record, in bytes.

    Raises:
        DataError: A chunk decodes to more than four times the limit of a record.
    """
    largest, limit = 1, CHUNKS_PER_RECORD * max_record_bytes
    try:
        with path.open("rb") as file:
            for place, size in _chunks(file, os.fstat(file.fileno()).st_size):
                if size > limit:
                    says = describe_oversize(size, limit, f"{CHUNKS_PER_RECORD} * max_record_bytes")
                    raise DataError(f"{name}, the chunk at byte {place}: {says}")
                largest = max(largest, size)
    except OSError as error:
        raise read_error(name, error) from error
    return max(1, min(max_records, limit // largest))


def _chunks(file: Any, end: int) -> Iterator[tuple[int, int]]:
    """Yield the offset of each chunk, and its decoded size."""
    at = 0
    while at < end:
        header = _read(file, at, _CHUNK_HEADER)
        if len(header) < _CHUNK_HEADER:
            return  # truncated, which the library reports
        size, kind, decoded = (read_number(header, place, "<Q") for place in (8, 24, 32))
        if at == 0 and (kind, size) != (_SIGNATURE, 0):
            return  # another format, which the library reports
        num_records = kind >> 8
        yield at, decoded
        after = _advance(at, _CHUNK_HEADER + size)
        # Each record has a separate position in the file.
        after = max(after, at + num_records)
        # No chunk begins in a block's header, nor directly after it.
        at = after if not 0 < after % _BLOCK <= _BLOCK_HEADER else after - after % _BLOCK + _BLOCK_HEADER + 1


def _read(file: Any, at: int, count: int) -> bytes:
    """Read bytes from an offset on, without the blocks' headers between them."""
    data = b""
    while len(data) < count:
        within = at % _BLOCK
        if within < _BLOCK_HEADER:
            at += _BLOCK_HEADER - within
            within = _BLOCK_HEADER
        file.seek(at)
        part = file.read(min(count - len(data), _BLOCK - within))
        if not part:
            break
        data += part
        at += len(part)
    return data


def _advance(at: int, count: int) -> int:
    """Return the offset after `count` more bytes, not counting those of blocks' headers."""
    within = at % _BLOCK
    # Relative to the beginning of the block's content.
    before = max(within - _BLOCK_HEADER, 0)
    blocks, rest = divmod(before + count, _BLOCK - _BLOCK_HEADER)
    if not rest:
        return at - within + blocks * _BLOCK
    return at - within + blocks * _BLOCK + _BLOCK_HEADER + rest
