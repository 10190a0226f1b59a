"""Decompressed sizes of the compressed buffers of an Arrow IPC file or stream, read from its metadata alone.

Arrow allocates the size stored in the eight bytes before a compressed buffer, before it decompresses. Only the
fields that lead to these bytes are read here: messages, their record batches, and the locations of their buffers.

Source: Arrow's columnar format (Message.fbs, File.fbs) and FlatBuffers' layout of tables and vectors.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from panax.core.errors import DataError

from ...system.binary_reader import BinaryError, check_count, read_number
from ..files.bounds import describe_oversize
from ..files.files import read_error

_MAGIC = b"ARROW1"
_CONTINUATION = 0xFFFFFFFF
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_BLOCK_BYTES = 24
_BUFFER_BYTES = 16


def check_ipc_sizes(path: Path, name: str, max_bytes: int, setting: str) -> None:
    """Raise an error if a record batch or a dictionary of a file decompresses to more than `max_bytes` bytes.

    Raises:
        DataError: A batch or dictionary is too large, or the file's metadata is damaged.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                for number, (metadata, body) in enumerate(_messages(data)):
                    size = _size_when_read(data, metadata, body)
                    if size > max_bytes:
                        raise DataError(f"{name}, message {number}: {describe_oversize(size, max_bytes, setting)}")
    except BinaryError as error:
        raise DataError(
            f"{name} can't be read: its metadata is damaged ({error}); check that it is complete, or write it again"
        ) from None
    except OSError as error:
        raise read_error(name, error) from error


def _messages(data: mmap.mmap) -> Iterator[tuple["_Table", int]]:
    """Yield each message, and the offset of its body."""
    if data[: len(_MAGIC)] == _MAGIC:
        footer_bytes = read_number(data, len(data) - len(_MAGIC) - 4, "<i")
        footer = _Table.root(data, len(data) - len(_MAGIC) - 4 - footer_bytes)
        for field in (2, 3):
            for at in footer.vector(field, _BLOCK_BYTES):
                offset, metadata_bytes = read_number(data, at, "<q"), read_number(data, at + 8, "<i")
                metadata, _ = _message(data, offset)
                if metadata is None:
                    raise BinaryError(f"no message at {offset}")
                yield metadata, offset + metadata_bytes
        return
    at = 0
    while at + 8 <= len(data):
        metadata, size = _message(data, at)
        if metadata is None:
            return
        yield metadata, at + size
        following = at + size + metadata.number(3, "<q")
        if following <= at:
            raise BinaryError("a message that ends before it begins")
        at = following


def _message(data: mmap.mmap, at: int) -> tuple["_Table | None", int]:
    """Return the message at an offset, and the size of its metadata and prefix; None for the message at the
    end of a stream."""
    first = read_number(data, at, "<I")
    prefix = 4
    if first == _CONTINUATION:
        first = read_number(data, at + 4, "<I")
        prefix = 8
    if not first:
        return None, prefix
    return _Table.root(data, at + prefix), prefix + first


def _size_when_read(data: mmap.mmap, message: "_Table", body: int) -> int:
    """Return the total decompressed size of a message's compressed buffers."""
    kind, batch = message.number(1, "<B"), message.table(2)
    if kind == _DICTIONARY_BATCH and batch is not None:
        batch = batch.table(1)
    if kind not in (_RECORD_BATCH, _DICTIONARY_BATCH) or batch is None or batch.table(3) is None:
        return 0
    total = 0
    for at in batch.vector(2, _BUFFER_BYTES):
        offset, length = read_number(data, at, "<q"), read_number(data, at + 8, "<q")
        if length >= 8 and offset >= 0:
            total += max(read_number(data, body + offset, "<q"), 0)
    return total


class _Table:
    """A FlatBuffers table in a file."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - read_number(data, at, "<i")
        self._fields_bytes = read_number(data, self._fields, "<H")

    @classmethod
    def root(cls, data: mmap.mmap, at: int) -> "_Table":
        return cls(data, at + read_number(data, at, "<I"))

    def _place(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry + 2 > self._fields_bytes:
            return None
        offset = read_number(self._data, self._fields + entry, "<H")
        return self._at + offset if offset else None

    def number(self, field: int, kind: str) -> int:
        at = self._place(field)
        return 0 if at is None else read_number(self._data, at, kind)

    def table(self, field: int) -> "_Table | None":
        at = self._place(field)
        return None if at is None else _Table.root(self._data, at)

    def vector(self, field: int, item_bytes: int) -> range:
        """Return the offset of each item of a vector of structs."""
        at = self._place(field)
        if at is None:
            return range(0)
        at += read_number(self._data, at, "<I")
        count = read_number(self._data, at, "<I")
        check_count(self._data, at + 4, count, item_bytes)
        return range(at + 4, at + 4 + count * item_bytes, item_bytes)
