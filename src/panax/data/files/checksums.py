"""Checksums of large files, verified once for each state of a file and then remembered."""

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
from ...system.sealed_json import json_checksum
from .files import decode_utf8, fingerprint, read_bytes, read_error

VERIFIED_FOLDER = "verified"
"""Subdirectory of a cache directory that records which files passed verification."""

MAX_NAMES_BYTES = 1 << 32
"""Maximum size of a cache entry's list of names: every word, item or user has one."""

_REMOVE = "remove its folder, and it is made again"
_BLOCK_BYTES = 2**23
_SETTLED_SECONDS = 2.0
"""Margin in seconds: a file that changed less than this before it was read may change again within the same
tick of the file system's clock."""


def compute_checksum(path: Path, look: Callable[[bytes, int], None] = lambda block, offset: None) -> str:
    """Compute the xxh3 hash of a file, 32 hexadecimal digits.

    Args:
        look: Called with each block of the file and the block's offset in bytes; blocks except the last have
            8 MiB.

    Raises:
        DataError: The file can't be read.
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
    """Compute the xxh3 hash of a header's fields except `seal`, 16 hexadecimal digits."""
    return json_checksum({name: value for name, value in header.items() if name != "seal"})


def write_sealed(path: Path, header: Mapping[str, Any], files: Sequence[str]) -> None:
    """Write a header as JSON, with the checksums of files in the same directory, and a seal of the header."""
    sealed = {**header, "checksums": {name: compute_checksum(path.with_name(name)) for name in files}}
    path.write_text(json.dumps({**sealed, "seal": compute_seal(sealed)}), encoding="utf-8")


def read_sealed(path: Path, verified_dir: Path | None) -> dict[str, Any]:
    """Read a header that `write_sealed` wrote, and verify the checksums of the files in its directory.

    Raises:
        DataError: The header or a file is damaged, or can't be read.
    """
    try:
        header = json_reader.parse(decode_utf8(read_bytes(path), str(path)))
        checksums = {str(name): str(value) for name, value in header["checksums"].items()}
        if header["seal"] != compute_seal(header) or any("/" in name for name in checksums):
            raise ValueError("its checksum does not match")
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); {_REMOVE}") from error
    files = {path.with_name(name): checksum for name, checksum in checksums.items()}

    def check() -> None:
        for file, checksum in files.items():
            if compute_checksum(file) != checksum:
                raise checksum_error(file, _REMOVE)

    verify_once(list(files), checksums, check, verified_dir)
    return header


def verify_once(
    files: Sequence[Path], expected: Mapping[str, object], check: Callable[[], None], verified_dir: Path | None
) -> None:
    """Call `check`, unless the files are unchanged since it last passed.

    Files count as unchanged if their sizes and times of change (of content and of status, in nanoseconds) are
    the same.

    Args:
        expected: Expected values; other values are checked again.
        verified_dir: The directory for the record of passed checks; None: no record, so files are checked each
            time.

    Raises:
        DataError: `check` raised it, or a file can't be read.
    """
    began = time.time()
    before = _states(files)
    record = None if verified_dir is None else verified_dir / fingerprint(before, dict(expected))
    if record is not None and record.exists():
        return
    check()
    changed = max(max(mtime, ctime) for _, _, mtime, ctime in before) / 1e9
    if record is not None and before == _states(files) and changed + _SETTLED_SECONDS < began:
        # If the result can't be recorded, the files are only checked again.
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
    """Return the error for a file with a checksum other than the recorded one."""
    return DataError(f"{path} is damaged: its checksum does not match the one stored when it was written; {remedy}")
