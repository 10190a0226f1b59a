"""The end of a file that another process writes, and new lines, in a form that is safe for terminals."""

import os
from pathlib import Path

from ..core.sanitize import make_printable

BLOCK_BYTES, MOST_TAIL_BYTES = 1 << 16, 1 << 24


def print_escaped(text: str) -> None:
    """Print text with control characters escaped."""
    print(make_printable(text))


def read_last_lines(path: Path, count: int) -> tuple[list[str], int]:
    """Return the last lines of a file and its length; at most `MOST_TAIL_BYTES` at its end are read."""
    if not path.is_file():
        return [], 0
    with open(path, "rb") as file:
        size = begin = file.seek(0, os.SEEK_END)
        data = b""
        while begin and data.count(b"\n") <= count and len(data) < MOST_TAIL_BYTES:
            length = min(begin, BLOCK_BYTES)
            begin -= length
            file.seek(begin)
            data = file.read(length) + data
    return data.decode(errors="replace").splitlines()[-count:], size


def follow(path: Path, offset: int, process: int | None, *, last: bool) -> int:
    """Print the lines of a file after byte `offset`, with `last` also an incomplete last line; return the new
    offset."""
    prefix = "" if process is None else f"{process}| "
    while path.is_file() and path.stat().st_size > offset:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(MOST_TAIL_BYTES)
        new_bytes = data[: data.rfind(b"\n") + 1]
        if not new_bytes and (last or len(data) == MOST_TAIL_BYTES):
            new_bytes = data
        if not new_bytes:
            break
        for line in new_bytes.decode(errors="replace").splitlines():
            print(f"{prefix}{make_printable(line)}")
        offset += len(new_bytes)
    return offset
