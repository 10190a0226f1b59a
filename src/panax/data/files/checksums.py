"""Checksums of large files, which are compared once for each state of a file and then remembered."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from panax.core.errors import DataError

from ...system import json_reader
from .files import decode_utf8, fingerprint, read_bytes, read_error

VERIFIED_FOLDER = "verified"
"""Of a cache directory, where it is remembered which files were compared with their checksums."""

MAX_NAMES_BYTES = 1 << 32
"""The longest list of names of a cache entry: every word, item or user has one."""

_REMOVE = "remove its folder, and it is made again"
_BLOCK_BYTES = 2**23
_SETTLED_SECONDS = 2.0
"""A file that changed later than this before it was read may change again within the same tick of the file system's clock."""


def compute_checksum(path: Path, look: Callable[[bytes, int], None] = lambda block, offset: None) -> str:
    """xxh3 of a file, 32 hexadecimal digits.

    Args:
        look: Called with each block of it and the block's offset in bytes; blocks but the last are of 8 MiB.

    Raises:
        DataError: It can't be read.
    """
    digest, offset = xxhash.xxh3_128(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK_BYTES):
                while len(block) < _BLOCK_BYTES and (more := file.read(_BLOCK_BYTES - len(block))):
                    block += more
                digest.update(block)
                look(block, offset)
                offset += len(block)
    except OSError as error:
        raise read_error(path, error) from error
    return digest.hexdigest()


def compute_seal(header: Mapping[str, Any]) -> str:
    """xxh3 of a header's fields but `seal` itself, 16 hexadecimal digits."""
    body = {name: value for name, value in header.items() if name != "seal"}
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def write_sealed(path: Path, header: Mapping[str, Any], files: Sequence[str]) -> None:
    """Write a header in JSON, with the checksums of files that lie beside it, and a seal of it all."""
    sealed = {**header, "checksums": {name: compute_checksum(path.with_name(name)) for name in files}}
    path.write_text(json.dumps({**sealed, "seal": compute_seal(sealed)}), encoding="utf-8")


def read_sealed(path: Path, seen: Path | None) -> dict[str, Any]:
    """A header that `write_sealed` wrote, once the files beside it are compared with their checksums.

    Raises:
        DataError: Something is damaged, or can't be read.
    """
    try:
        header = json_reader.parse(decode_utf8(read_bytes(path), str(path)))
        checksums = {str(name): str(value) for name, value in header["checksums"].items()}
        if header["seal"] != compute_seal(header) or any("/" in name for name in checksums):
            raise ValueError("its seal does not hold")
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); {_REMOVE}") from error
    files = {path.with_name(name): checksum for name, checksum in checksums.items()}

    def check() -> None:
        for file, checksum in files.items():
            if compute_checksum(file) != checksum:
                raise checksum_error(file, _REMOVE)

    verify_once(list(files), checksums, check, seen)
    return header


def verify_once(
    files: Sequence[Path], expected: Mapping[str, object], check: Callable[[], None], seen: Path | None
) -> None:
    """Call `check`, but not again for files that are as they were when it last passed.

    Files are taken for unchanged where sizes and times of change (of content and of status, in nanoseconds) are the same.

    Args:
        expected: What they are compared with; another one is checked again.
        seen: The directory where it is remembered; None: nowhere, so it is checked each time.

    Raises:
        DataError: `check` raised it, or a file can't be read.
    """
    began = time.time()
    before = _states(files)
    record = None if seen is None else seen / fingerprint(before, dict(expected))
    if record is not None and record.exists():
        return
    check()
    changed = max(max(mtime, ctime) for _, _, mtime, ctime in before) / 1e9
    if record is not None and before == _states(files) and changed + _SETTLED_SECONDS < began:
        # Where it can't be remembered, it is only checked again.
        with contextlib.suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            record.touch()


def _states(files: Sequence[Path]) -> list[tuple[str, int, int, int]]:
    found = []
    for path in files:
        try:
            status = os.stat(path)
        except OSError as error:
            raise read_error(path, error) from error
        found.append((str(path.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return found


def checksum_error(path: Path, remedy: str) -> DataError:
    """What to raise where a file's checksum is another than the one that was written down."""
    return DataError(f"{path} is damaged: its checksum is not that of what was written; {remedy}")
