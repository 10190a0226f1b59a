"""Readers for the headers of other programs' binary files: never beyond the data, and never more than a file
can hold.

`struct.unpack_from` takes negative offsets from the end, `np.frombuffer` and slices return less than was
requested, and a count of 2**62 fills memory before an error is raised. Here each claim (an offset, a size, a
count) is compared with the available bytes, and a wrong one raises a `BinaryError`.
"""

import struct
from typing import Protocol

MAX_VARINT_BITS = 64


class BinaryError(ValueError):
    """Bytes that violate a format; the message describes the error, but not the file."""


class TruncatedError(BinaryError):
    """The bytes end before the announced data; a caller that has read only a part of a file may read more of
    it and try again."""


class ByteBuffer(Protocol):
    """Bytes, a `memoryview` or an `mmap`."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> bytes | memoryview: ...


def read_number(data: ByteBuffer, at: int, kind: str) -> int:
    """Read the number at an offset.

    Args:
        at: Offset in bytes from the beginning.
        kind: Format of one integer, as in `struct`: "<I", ">q".

    Raises:
        BinaryError: The offset is before the beginning.
        TruncatedError: The number reaches beyond the end.

    >>> read_number(bytes([1, 0, 0, 0, 255, 255, 255, 255]), 4, "<i")
    -1
    """
    (number,) = struct.unpack(kind, read_bytes(data, at, struct.calcsize(kind)))
    return number


def read_bytes(data: ByteBuffer, at: int, count: int) -> bytes:
    """Return `count` bytes from an offset on.

    Raises:
        BinaryError: The offset is before the beginning, or the count is negative.
        TruncatedError: The bytes reach beyond the end.
    """
    if at < 0 or count < 0:
        raise BinaryError(f"{count:,} bytes at byte {at:,}")
    if at + count > len(data):
        raise TruncatedError(f"{count:,} bytes at byte {at:,} of {len(data):,}")
    return bytes(data[at : at + count])


def check_count(data: ByteBuffer, at: int, count: int, item_bytes: int = 1) -> None:
    """Check that items of at least `item_bytes` each fit the data, before memory is allocated for them.

    Raises:
        BinaryError: The count is negative.
        TruncatedError: The items would reach beyond the end.
    """
    if at < 0 or count < 0:
        raise BinaryError(f"{count:,} items at byte {at:,}")
    if count * item_bytes > len(data) - at:
        raise TruncatedError(f"{count:,} items of {item_bytes} bytes or more at byte {at:,} of {len(data):,}")


class BinaryReader:
    """Sequential reader of values.

    Attributes:
        at: Offset of the next value, in bytes.
    """

    def __init__(self, data: ByteBuffer, at: int = 0) -> None:
        self.data, self.at = data, at

    def byte(self) -> int:
        """Read the next byte.

        Raises:
            TruncatedError: The data has ended.
        """
        if self.at >= len(self.data):
            raise TruncatedError(f"a byte at byte {self.at:,} of {len(self.data):,}")
        self.at += 1
        return self.data[self.at - 1 : self.at][0]

    def number(self, kind: str) -> int:
        """Read the next number; see `read_number`."""
        number = read_number(self.data, self.at, kind)
        self.at += struct.calcsize(kind)
        return number

    def take(self, count: int) -> bytes:
        """Read the next `count` bytes; see `read_bytes`."""
        data = read_bytes(self.data, self.at, count)
        self.at += count
        return data

    def varint(self) -> int:
        """Read the next number of seven bits per byte, the lowest first.

        Raises:
            BinaryError: The number has more than 64 bits.
            TruncatedError: The data ends before the number does.

        >>> BinaryReader(bytes([0x96, 0x01])).varint()
        150
        """
        value = 0
        for shift in range(0, MAX_VARINT_BITS, 7):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise BinaryError(f"a number of more than {MAX_VARINT_BITS} bits")

    def zigzag(self) -> int:
        """Read the next `varint` with its sign in the lowest bit.

        >>> BinaryReader(bytes([3])).zigzag()
        -2
        """
        value = self.varint()
        return (value >> 1) ^ -(value & 1)
