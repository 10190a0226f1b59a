"""Atomic replacement of a file: a reader, a crash or a power failure sees the old content or the new one, whole."""

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PARTIAL_ENDING = ".part"
"""How a replacement's name ends until it is complete; a killed process leaves it."""


@contextlib.contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """Yield a path in the same folder at which to write a file; it replaces `path` when the block ends, and is
    removed if the block raises.

    A link at `path` is replaced; its target stays as it is.

    Raises:
        OSError: The file can't be flushed or renamed.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL_ENDING}")
    try:
        yield partial
        _flush(partial)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    # Without it, a power failure may bring the old name back.
    flush_folder(path.parent)


def replace_file(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Replace a file, created if missing.

    Args:
        content: The whole content; a text is written as UTF-8, with "?" for characters that UTF-8 can't encode.
        private: True for a file that only this user may read or write, whatever the umask permits.

    Raises:
        OSError: The file can't be written.
    """
    data = content.encode(errors="replace") if isinstance(content, str) else content
    with replacement(path) as partial:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(partial, flags, 0o600 if private else 0o666), "wb") as file:
            file.write(data)


def replace_json(path: Path, value: Any, *, indent: int = 1) -> None:
    """Replace a file by a value as JSON.

    Raises:
        OSError: The file can't be written.
    """
    replace_file(path, json.dumps(value, indent=indent) + "\n")


def flush_folder(folder: Path) -> None:
    """Flush a folder's entries to its disk.

    Raises:
        OSError: The disk fails, or the folder is missing.
    """
    _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
