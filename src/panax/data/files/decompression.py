"""Files as streams, decompressed according to their first bytes (gzip, bz2, xz and zstd), with bounded
memory.

A few bytes can expand to terabytes. A file that grows beyond `MAX_RATIO` times its size is therefore
rejected, and no decompressor may use a window of more than `_MOST_WINDOW_BYTES`.
"""

import bz2
import contextlib
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from panax.core.errors import DataError

from .files import read_error
from .magic import HEADER_BYTES, detect_compression

MAX_RATIO = 500
"""Maximum ratio of decompressed to compressed size: the best case, nearly identical lines of text, reaches a
few hundred."""

UNCHECKED_BYTES = 2**26
"""Decompressed size up to which no ratio is checked."""

_MOST_WINDOW_BYTES = 2**28
_READ_BYTES = 2**16

SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zstd")
"""File name endings of compressed files."""


@contextlib.contextmanager
def open_file(path: Path, name: str) -> Iterator[Any]:
    """Open a file for reading, decompressed if it is compressed.

    Args:
        name: The file's name for error messages.

    Raises:
        DataError: The file can't be read, is damaged, or expands far beyond its size. Also raised while the
            file is read.
    """
    try:
        with path.open("rb") as raw:
            kind = detect_compression(raw.read(8))
            raw.seek(0)
            if kind is None:
                yield raw
                return
            bounded = BoundedStream(_decompressing(raw, kind, name), raw.tell, name, kind)
            with io.BufferedReader(bounded, _READ_BYTES) as file:
                yield file
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, DataError):
            raise
        raise read_error(name, error) from error


def is_compressed(path: Path) -> bool:
    """Return True if a file's first bytes are those of a compression format."""
    with path.open("rb") as file:
        return detect_compression(file.read(8)) is not None


def read_first_bytes(path: Path, name: str) -> bytes:
    """Read the beginning of a file, decompressed.

    Raises:
        DataError: As `open_file`.
    """
    with open_file(path, name) as file:
        return file.read(HEADER_BYTES)


def _decompressing(raw: Any, kind: str, name: str) -> Any:
    if kind == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if kind == "bz2":
        return _Stream(raw, bz2.BZ2Decompressor)
    if kind == "xz":
        return _Stream(raw, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MOST_WINDOW_BYTES), padding=b"\0")
    if kind == "zstd":
        zstd = _zstd(name)
        log = _MOST_WINDOW_BYTES.bit_length() - 1
        options = {zstd.DecompressionParameter.window_log_max: log}
        return _ErrorTranslatingStream(_Stream(raw, lambda: zstd.ZstdDecompressor(options=options)), zstd.ZstdError)
    raise DataError(
        f"{name} is compressed with {kind}, which is not supported; compress it with zstd or gzip, or not at all"
    )


def _zstd(name: str) -> Any:
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as error:
        raise DataError(
            f"{name} is compressed with zstd, which this Python reads with the package backports.zstd: install that, or "
            f"decompress the file (`zstd -d`)"
        ) from error
    return zstd


class _Stream(io.RawIOBase):
    """Decompressed stream of a file, which may hold several compressed streams in sequence."""

    def __init__(self, raw: Any, make: Callable[[], Any], *, padding: bytes = b"") -> None:
        """Decompress `raw`.

        Args:
            make: Returns a new decompressor, like those of bz2, lzma and zstd.
            padding: Bytes allowed between two streams.
        """
        self._raw, self._make, self._padding = raw, make, padding
        self._decompressor = make()
        self._begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        while len(view):
            data = b""
            if self._decompressor.eof:
                data = self._decompressor.unused_data or self._raw.read(_READ_BYTES)
                while self._padding and data and not (data := data.lstrip(self._padding)):
                    data = self._raw.read(_READ_BYTES)
                if not data:
                    return 0
                self._decompressor = self._make()
            elif self._decompressor.needs_input and not (data := self._raw.read(_READ_BYTES)):
                raise EOFError("the file ends before its end-of-stream marker: it is cut short")
            decompressed = self._decompressor.decompress(data, len(view))
            if decompressed:
                view[: len(decompressed)] = decompressed
                return len(decompressed)
        return 0


class _ErrorTranslatingStream(io.RawIOBase):
    """A stream that raises a library's errors as read errors."""

    def __init__(self, inner: Any, error: type[Exception]) -> None:
        self._inner, self._error = inner, error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._inner.readinto(buffer)
        except self._error as error:
            raise OSError(str(error)) from error


class BoundedStream(io.RawIOBase):
    """A decompressed stream that must not become far larger than its compressed input."""

    def __init__(self, inner: Any, consumed: Callable[[], int], name: str, kind: str) -> None:
        """Bound `inner`.

        Args:
            consumed: Returns the number of compressed bytes read so far.
        """
        self._inner, self._consumed, self._name, self._kind = inner, consumed, name, kind
        self._num_decompressed = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._inner.readinto(buffer)
        self._num_decompressed += count
        if self._num_decompressed > UNCHECKED_BYTES and self._num_decompressed > MAX_RATIO * self._consumed():
            raise DataError(
                f"{self._name}: its first {self._consumed():,} bytes, compressed with {self._kind}, become "
                f"{self._num_decompressed:,} bytes or more; expected at most {MAX_RATIO} times as many: decompress the file "
                f"first if that is right"
            )
        return count

    def close(self) -> None:
        if not self.closed:
            self._inner.close()
        super().close()
