"""Finding, reading and fingerprinting the files of a corpus, here or in an object store; each failure names
the file."""

import contextlib
import glob
import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from panax.core.errors import DataError
from panax.stores import REMOTE, is_remote, redact_address
from panax.system.files import expand_user

from .file_cache import CacheFullError
from .magic import detect_format
from .package_files import SCHEME, package_file
from .remote import RemoteObject, find_objects

_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_COMPRESSIONS = ("gzip", "bz2", "xz", "zstd", "lz4", "compress", "lzma")
_UTF8_BOM = b"\xef\xbb\xbf"
_FILES_AHEAD = 8
_BYTES_AHEAD = 2**28


class BadRecordError(DataError):
    """A record can't be used, but later records can.

    Attributes:
        where: The file, and the line or row in it.
        reason: The problem, and what was expected.
    """

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where = where
        self.reason = reason


class DataFile(NamedTuple):
    """A file to read from.

    Attributes:
        name: Its path or address, for error messages.
        remote: The object in an object store; None for a local file.
        path: Absolute path of a local file, independent of later changes of the current folder; empty:
            `name`.
    """

    name: str
    remote: RemoteObject | None = None
    path: str = ""

    @property
    def local(self) -> Path:
        """Return the path of a local file."""
        return Path(self.path or self.name)

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def identity(self) -> tuple[str, int, int | str]:
        """Return the absolute name, the size in bytes, and the time of change in nanoseconds or the store's
        tag."""
        if self.remote is not None:
            return self.name, self.remote.size, self.remote.tag
        path = self.local
        try:
            status = path.stat()
        except OSError as error:
            raise read_error(path, error) from error
        return str(path.absolute()), status.st_size, status.st_mtime_ns

    @contextlib.contextmanager
    def open_local(self, *, wait: bool = True) -> Iterator[Path]:
        """Yield a local path, valid as long as the block lasts: the file itself, or a copy in the file cache.

        Args:
            wait: True to wait for room in the cache.

        Raises:
            DataError: There is no room for a copy, or the file has changed since it was found.
            StoreError: The store can't be read.
        """
        if self.remote is None:
            yield self.local
        else:
            with self.remote.open_local(wait=wait) as path:
                yield path


_Copy = tuple[contextlib.ExitStack, Path]


def open_each_local(files: Sequence[DataFile]) -> Iterator[tuple[str, Path]]:
    """Yield each file's name and a local path, valid until the next is requested.

    While a remote file is in use, the next ones are copied.
    """
    if not any(file.remote for file in files):
        yield from ((file.name, file.local) for file in files)
        return
    ahead: deque[Future[_Copy]] = deque()
    pool = ThreadPoolExecutor(_FILES_AHEAD)
    started = 0
    try:
        for number, file in enumerate(files):
            started = max(started, number)
            while started < len(files) and _may_start(files[number + 1 : started + 1], len(ahead)):
                ahead.append(pool.submit(_copy, files[started], wait=False))
                started += 1
            lease, path = _copied(ahead, file)
            started = number + 1 + len(ahead)
            with lease:
                yield file.name, path
    finally:
        _release(ahead)
        pool.shutdown(wait=False)


def _may_start(after_current: Sequence[DataFile], count: int) -> bool:
    size = sum(file.remote.size for file in after_current if file.remote)
    return count < _FILES_AHEAD and (len(after_current) <= 1 or size <= _BYTES_AHEAD)


def _copied(ahead: "deque[Future[_Copy]]", file: DataFile) -> _Copy:
    if ahead:
        with contextlib.suppress(CacheFullError):
            return ahead.popleft().result()
        # The copies made ahead may be filling the cache.
        _release(ahead)
    return _copy(file, wait=True)


def _copy(file: DataFile, *, wait: bool) -> _Copy:
    stack = contextlib.ExitStack()
    return stack, stack.enter_context(file.open_local(wait=wait))


def _release(ahead: "deque[Future[_Copy]]") -> None:
    """Release copies, now or as soon as they are complete."""
    while ahead:
        future = ahead.popleft()
        if not future.cancel():
            future.add_done_callback(_close)


def _close(copied: "Future[_Copy]") -> None:
    if copied.exception() is None:
        copied.result()[0].close()


def find_files(paths: Sequence[str], patterns: Sequence[str]) -> list[DataFile]:
    """List the files that `paths` name, in an order that depends on names alone.

    Args:
        paths: Each a file, a directory (searched with `patterns`; hidden files and linked directories
            in it are skipped), or a glob; local, or in an object store (`s3://bucket/texts/*.jsonl`).
            `package:NAME/PATH` is a file inside an installed Python package.
        patterns: Globs to match inside a directory, as in `Path.glob`.

    Raises:
        DataError: `paths` is empty, a path does not exist, or a directory or glob holds no match.
        StoreError: An object store can't be listed.
    """
    if not paths:
        raise DataError("the corpus names no path; expected at least one file, directory or glob in `paths`")
    files: dict[str, DataFile] = {}
    for name in paths:
        if is_remote(name):
            files.update((each.url, DataFile(each.url, each)) for each in find_objects(name, patterns))
            continue
        if "://" in name:
            raise DataError(
                f"{redact_address(name)} can't be read: expected a path of this machine or {', '.join(REMOTE[:3])}..., with "
                f"credentials in the environment"
            )
        path = package_file(name) if name.startswith(SCHEME) else expand_user(name)
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
        files.update((str(match), DataFile(str(match), path=str(match.absolute()))) for match in matches)
    return list(files.values())


def _search(directory: Path, patterns: Sequence[str]) -> list[Path]:
    matches: set[Path] = set()
    ends = tuple(pattern.removeprefix("**/*") for pattern in patterns if pattern.startswith("**/*"))
    if len(ends) == len(patterns) and not any(glob.has_magic(end) or "/" in end for end in ends):
        # One walk for all patterns: folders are large, and there are many endings.
        matches = {path for path in directory.glob("**/*") if path.name.endswith(ends)}
        patterns = ()
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
        raise read_error(path, error) from error
    except MemoryError as error:
        raise DataError(
            f"{path} has {path.stat().st_size:,} bytes, for which there is no memory; cut it into several files"
        ) from error


def read_error(path: Path | str, error: Exception) -> DataError:
    """Return the error for a file that the system can't read, or a format's reader rejects."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return DataError(f"{path} can't be read: {reason}; check that it exists, is complete, and that you may read it")


def decode_utf8(data: bytes, where: str, *, start: int = 0) -> str:
    """Decode UTF-8 strictly, dropping a byte order mark at the beginning of a file.

    Args:
        data: The bytes.
        where: Location of the bytes for error messages: the file, and the line if there is one.
        start: Offset of the bytes in the file.

    Raises:
        BadRecordError: The bytes are not UTF-8; the message gives the first wrong byte's offset in the file.

    >>> decode_utf8(b"caf\\xe9", "menu.txt")
    Traceback (most recent call last):
        ...
    panax.data.files.files.BadRecordError: menu.txt: byte 3 is 0xe9, which is not UTF-8; expected UTF-8 text: \
convert it (`iconv -f LATIN1 -t UTF-8`), or remove the file
    """
    skip = len(_UTF8_BOM) if start == 0 and data.startswith(_UTF8_BOM) else 0
    try:
        return data[skip:].decode("utf-8")
    except UnicodeDecodeError as error:
        kind = detect_format(data) if start == 0 else None
        if kind is not None:
            compressed = kind in _COMPRESSIONS
            raise BadRecordError(
                where,
                f"it is {f'compressed ({kind})' if compressed else f'a file of the format {kind}'}, and UTF-8 text is "
                f"expected: {'decompress it' if compressed else 'use the source for that format'}, or remove the file",
            ) from None
        offset = start + skip + error.start
        encoding = "LATIN1" if start else _BOMS.get(data[:2], "LATIN1")
        raise BadRecordError(
            where,
            f"byte {offset} is 0x{data[skip + error.start]:02x}, which is not UTF-8; expected UTF-8 text: convert it "
            f"(`iconv -f {encoding} -t UTF-8`), or remove the file",
        ) from None


def fingerprint(*parts: object) -> str:
    """Compute a short hash of JSON values: 32 hexadecimal digits.

    >>> fingerprint("a", 1) == fingerprint("a", 1) != fingerprint("a", 2)
    True
    """
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def cache_identity(files: Sequence[DataFile | Path]) -> Iterator[tuple[Any, ...]]:
    """Yield the cache key of each file's content: its identity, and the time of the last change of its inode.

    A file that is replaced by one of the same size with its time of change preserved (`cp -p`, `rsync -t`)
    gets a different key.
    """
    for file in files:
        found = file if isinstance(file, DataFile) else DataFile(str(file))
        yield (*found.identity, *(() if found.remote is not None else (found.local.stat().st_ctime_ns,)))


def stat_files(files: Sequence[DataFile | Path]) -> Iterator[tuple[str, int, int | str]]:
    """Yield each file's absolute name, its size in bytes, and its time of change in nanoseconds or its
    store's tag."""
    for file in files:
        yield (file if isinstance(file, DataFile) else DataFile(str(file))).identity
