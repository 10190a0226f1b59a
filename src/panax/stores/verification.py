"""Whether a store holds what it was sent: the tag that it answers, or else the object read back."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .failures import TruncatedReadError, WriteMismatchError
from .store import Buffer


def entity_tag(parts: Sequence[Buffer], part_bytes: int | None = None) -> str:
    """The tag that S3 gives an object which it does not encrypt with a key: its MD5, or that of the MD5s of its parts.

    Args:
        part_bytes: The size of the parts of an upload in parts; None for one request.

    >>> entity_tag([b"hel", b"lo"])
    '5d41402abc4b2a76b9719d911017c592'
    """
    if part_bytes is None:
        return _md5(parts).hexdigest()
    digests = [_md5(pieces).digest() for pieces in _cut(parts, part_bytes)]
    return f"{_md5(digests).hexdigest()}-{len(digests)}"


def verify_written(chunks: Iterable[Buffer], parts: Sequence[Buffer]) -> None:
    """Compare what a store holds with what was sent.

    Raises:
        NotAsSentError: They differ.
    """
    found, size, expected_size = hashlib.md5(usedforsecurity=False), 0, sum(len(part) for part in parts)
    for chunk in chunks:
        found.update(chunk)
        size += len(chunk)
    if size != expected_size:
        raise WriteMismatchError(f"the store holds {size} bytes where {expected_size} were sent")
    if found.digest() != _md5(parts).digest():
        raise WriteMismatchError("what the store holds is not what was sent")


class ReadCheck:
    """Compares what is read with a tag that may be its MD5. The same bytes twice show that the tag is another thing."""

    def __init__(self) -> None:
        self._unlike: set[str] = set()

    def __call__(self, body: bytes, tag: str | None) -> None:
        """Raises CutShortError where the bytes have another MD5 than the tag names, the first time."""
        found, expected = entity_tag([body]), (tag or "").strip('"')
        if re.fullmatch("[0-9a-f]{32}", expected) and found != expected and found not in self._unlike:
            self._unlike.add(found)
            raise TruncatedReadError("the answer is not what its checksum says")


def _md5(parts: Iterable[Buffer]) -> Any:
    found = hashlib.md5(usedforsecurity=False)
    for part in parts:
        found.update(part)
    return found


def _cut(parts: Sequence[Buffer], size: int) -> Iterator[list[memoryview]]:
    """The bytes of `parts` in runs of `size`, each as views of the parts that it lies in."""
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
