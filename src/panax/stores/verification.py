"""Verification that a store holds the bytes it was sent: by its tag, or by reading the object back."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .failures import TruncatedReadError, WriteMismatchError
from .store import Buffer


def entity_tag(parts: Sequence[Buffer], part_bytes: int | None = None) -> str:
    """Compute the tag that S3 gives an object which it does not encrypt with a key: its MD5, or that of the
    MD5s of its parts.

    Args:
        part_bytes: The size of the parts of a multipart upload; None for one request.

    >>> entity_tag([b"hel", b"lo"])
    '5d41402abc4b2a76b9719d911017c592'
    """
    if part_bytes is None:
        return _md5(parts).hexdigest()
    digests = [_md5(pieces).digest() for pieces in _cut(parts, part_bytes)]
    return f"{_md5(digests).hexdigest()}-{len(digests)}"


def verify_written(chunks: Iterable[Buffer], parts: Sequence[Buffer]) -> None:
    """Compare the stored bytes with those that were sent.

    Raises:
        WriteMismatchError: The bytes differ.
    """
    digest, size, expected_size = hashlib.md5(usedforsecurity=False), 0, sum(len(part) for part in parts)
    for chunk in chunks:
        digest.update(chunk)
        size += len(chunk)
    if size != expected_size:
        raise WriteMismatchError(f"the store holds {size} bytes where {expected_size} were sent")
    if digest.digest() != _md5(parts).digest():
        raise WriteMismatchError("the store holds other bytes than were sent")


class ReadCheck:
    """Comparison of read bytes with a tag that may be their MD5. The same bytes twice show that the tag is
    something else."""

    def __init__(self) -> None:
        self._unlike: set[str] = set()

    def __call__(self, body: bytes, tag: str | None) -> None:
        """Raise TruncatedReadError if the bytes have another MD5 than the tag, the first time."""
        found, expected = entity_tag([body]), (tag or "").strip('"')
        if re.fullmatch("[0-9a-f]{32}", expected) and found != expected and found not in self._unlike:
            self._unlike.add(found)
            raise TruncatedReadError("the answer does not match its checksum")


def _md5(parts: Iterable[Buffer]) -> Any:
    found = hashlib.md5(usedforsecurity=False)
    for part in parts:
        found.update(part)
    return found


def _cut(parts: Sequence[Buffer], size: int) -> Iterator[list[memoryview]]:
    """Yield the bytes of `parts` in runs of `size`, each as views of the parts that it spans."""
    run, room = [], size
    for part in parts:
        view = memoryview(part)
        while len(view):
            piece, view = view[:room], view[room:]
            run.append(piece)
            room -= len(piece)
            if not room:
                yield run
                run, room = [], size
    if run:
        yield run
