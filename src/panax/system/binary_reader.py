"""Reads the headers of other programs' binary files: never beyond what is there, and never more than a file can hold.

`struct.unpack_from` takes negative places from the end, `np.frombuffer` and slices give less than was asked for, and a count of
2**62 fills memory before anything is missed. Here each claim (a place, a size, a count) is compared with the bytes that are
there, and what is wrong is a `BinaryError`.
"""

import struct
from typing import Protocol

MAX_VARINT_BITS = 64


class BinaryError(ValueError):
    """Bytes that are not what a format says; the message says what is wrong, and not where they lie."""


class TruncatedError(BinaryError):
    """The bytes end before what they announce; who read only a part of a file may read more of it, and try again."""


class ByteBuffer(Protocol):
    """Bytes, a `memoryview` or an `mmap`."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> bytes | memoryview: ...


def read_number(data: ByteBuffer, at: int, kind: str) -> int:
    """The number at a place.

    Args:
        at: In bytes from the beginning.
        kind: As `struct` writes it, of one integer: "<I", ">q".

    Raises:
        BinaryError: The place is before the beginning.
        CutShort: The number reaches beyond the end.

    >>> read_number(bytes([1, 0, 0, 0, 255, 255, 255, 255]), 4, "<i")
    -1
    """
    (number,) = struct.unpack(kind, read_bytes(data, at, struct.calcsize(kind)))
    return number


def read_bytes(data: ByteBuffer, at: int, count: int) -> bytes:
    """So many bytes from a place on.

    Raises:
        BinaryError: The place is before the beginning, or the count is negative.
        CutShort: They reach beyond the end.
    """
    if at < 0 or count < 0:
        raise BinaryError(f"{count:,} bytes at byte {at:,}")
    if at + count > len(data):
        raise TruncatedError(f"{count:,} bytes at byte {at:,} of {len(data):,}")
    return bytes(data[at : at + count])


def check_count(data: ByteBuffer, at: int, count: int, item_bytes: int = 1) -> None:
    """See that items which take at least `item_bytes` each can be there, before memory is taken for them.

    Raises:
        BinaryError: The count is negative.
        CutShort: They would reach beyond the end.
    """
    if at < 0 or count < 0:
        raise BinaryError(f"{count:,} items at byte {at:,}")
    if count * item_bytes > len(data) - at:
        raise TruncatedError(f"{count:,} items of {item_bytes} bytes or more at byte {at:,} of {len(data):,}")


class BinaryReader:
    """Reads one value after another.

    Attributes:
        at: Where the next one begins, in bytes.
    """

    def __init__(self, data: ByteBuffer, at: int = 0) -> None:
        self.data, self.at = data, at

    def byte(self) -> int:
        """The next byte.

        Raises:
            CutShort: There is none.
        """
        if self.at >= len(self.data):
            raise TruncatedError(f"a byte at byte {self.at:,} of {len(self.data):,}")
        self.at += 1
        return self.data[self.at - 1 : self.at][0]

    def number(self, kind: str) -> int:
        """The next number; see `read_number`."""
        number = read_number(self.data, self.at, kind)
        self.at += struct.calcsize(kind)
        return number

    def take(self, count: int) -> bytes:
        """The next so many bytes; see `read_bytes`."""
        found = read_bytes(self.data, self.at, count)
        self.at += count
        return found

    def varint(self) -> int:
        """The next number of seven bits a byte, the lowest first.

        Raises:
            BinaryError: It has more than 64 bits.
            CutShort: It has no end.

        >>> BinaryReader(bytes([0x96, 0x01])).varint()
        150
        """
        found = 0
        for shift in range(0, MAX_VARINT_BITS, 7):
            byte = self.byte()
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return found
        raise BinaryError(f"a number of more than {MAX_VARINT_BITS} bits")

    def zigzag(self) -> int:
        """The next `varint` with its sign in the lowest bit.

        >>> BinaryReader(bytes([3])).zigzag()
        -2
        """
        found = self.varint()
        return (found >> 1) ^ -(found & 1)
