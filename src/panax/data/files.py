"""Finding, reading and fingerprinting the files of a corpus; each failure names the file and what to do."""

import glob
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from panax.core.errors import DataError

_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_UTF8_BOM = b"\xef\xbb\xbf"


def find_files(paths: Sequence[str], patterns: Sequence[str]) -> list[Path]:
    """List the files that `paths` name, in an order that depends on names alone.

    Args:
        paths: Each a file, a directory (searched with `patterns`; hidden files and linked directories
            in it are left out), or a glob.
        patterns: What to look for inside a directory, as in `Path.glob`.

    Raises:
        DataError: `paths` is empty, one does not exist, or a directory or glob holds no match.
    """
    if not paths:
        raise DataError("the corpus names no path; expected at least one file, directory or glob in `paths`")
    found: dict[Path, None] = {}
    for name in paths:
        path = Path(name).expanduser()
        if path.is_file():
            matches = [path]
        elif path.is_dir():
            matches = _search(path, patterns)
            if not matches:
                raise DataError(
                    f"no file in the directory {name} matches {' or '.join(patterns)}; name another directory"
                )
        else:
            matches = sorted(p for match in glob.glob(str(path), recursive=True) if (p := Path(match)).is_file())
            if not matches:
                raise DataError(f"{name} does not exist; expected a file, a directory, or a glob that matches files")
        found.update(dict.fromkeys(matches))
    return list(found)


def _search(directory: Path, patterns: Sequence[str]) -> list[Path]:
    matches = set()
    for pattern in patterns:
        try:
            matches.update(directory.glob(pattern))
        except (ValueError, NotImplementedError) as error:
            raise DataError(
                f"pattern {pattern!r} can't be used: {error}; expected one relative to {directory}"
            ) from error
    relative = sorted((match.relative_to(directory).parts, match) for match in matches)
    return [match for parts, match in relative if not any(p.startswith(".") for p in parts) and match.is_file()]


def read_bytes(path: Path) -> bytes:
    """Read a whole file.

    Raises:
        DataError: The file can't be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path | str, error: Exception) -> DataError:
    """What to raise when the system, or a format's own reader, refuses a file."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return DataError(f"{path} can't be read: {reason}; check that it exists, is complete, and that you may read it")


def decode_utf8(data: bytes, where: str, *, start: int = 0) -> str:
    """Decode UTF-8 strictly, dropping a byte order mark at the beginning of a file.

    Args:
        data: The bytes.
        where: What an error calls them: the file, and the line where there is one.
        start: Their offset in the file, in bytes.

    Raises:
        DataError: They are not UTF-8; the message gives the first wrong byte's offset in the file.

    >>> decode_utf8(b"caf\\xe9", "menu.txt")
    Traceback (most recent call last):
        ...
    panax.core.errors.DataError: menu.txt: byte 3 is 0xe9, which is not UTF-8; expected UTF-8 text: \
convert it (`iconv -f LATIN1 -t UTF-8`), or leave the file out
    """
    skip = len(_UTF8_BOM) if start == 0 and data.startswith(_UTF8_BOM) else 0
    try:
        return data[skip:].decode("utf-8")
    except UnicodeDecodeError as error:
        offset = start + skip + error.start
        encoding = "LATIN1" if start else _BOMS.get(data[:2], "LATIN1")
        raise DataError(
            f"{where}: byte {offset} is 0x{data[skip + error.start]:02x}, which is not UTF-8; expected UTF-8 text: "
            f"convert it (`iconv -f {encoding} -t UTF-8`), or leave the file out"
        ) from None


def fingerprint(*parts: Any) -> str:
    """A short hash of JSON values: 32 hexadecimal digits.

    >>> fingerprint("a", 1) == fingerprint("a", 1) != fingerprint("a", 2)
    True
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def file_marks(files: Sequence[Path]) -> Iterator[tuple[str, int, int]]:
    """Yield each file's absolute name, its size in bytes and its time of change in nanoseconds."""
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise unreadable(path, error) from error
        yield str(path.absolute()), status.st_size, status.st_mtime_ns
