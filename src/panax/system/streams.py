"""A command's standard streams: always open, for every character; they never block or end work that is not
printing."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import IO, Any

from .outlet import Outlet


def repair_streams() -> None:
    """Open the standard streams of a process: closed ones are opened as the null device, and characters that
    the encoding lacks are escaped.

    Otherwise a file that is opened while a standard descriptor is closed would take its number, and libraries
    would print into that file.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = getattr(sys, name)
        if stream is None:
            with contextlib.suppress(OSError):
                os.fstat(descriptor)
                continue
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
            stream = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115  (as long as the process)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        if mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def tolerate_output_errors() -> Iterator[None]:
    """Ignore output errors: a full disk, a closed pipe or a paused terminal neither fails nor blocks the
    command.

    Output that can't be written is dropped; at the end pending output is flushed with a time limit.
    """
    before = sys.stdout, sys.stderr
    try:
        for name, stream in zip(("stdout", "stderr"), before, strict=True):
            if _has_descriptor(stream):
                setattr(sys, name, _text(Outlet(stream), stream))
        yield
    finally:
        written = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = before
        for stream in written:
            _finish(stream)


def write_last_words(text: str = "") -> None:
    """Write a final message to standard error, and flush pending output with a time limit."""
    outlet = Outlet(sys.stderr)
    outlet.write(text)
    for stream in (sys.stdout, sys.stderr):
        _finish(stream)
    outlet.close()


def _finish(stream: Any) -> None:
    if isinstance(getattr(stream, "buffer", None), _Raw):
        stream.buffer.outlet.close()


def _has_descriptor(stream: Any) -> bool:
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False


def _text(outlet: Outlet, stream: IO[str]) -> io.TextIOWrapper:
    raw: Any = _Raw(outlet, stream)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace", write_through=True)


class _Raw(io.RawIOBase):
    """File of bytes that writes to an outlet.

    Attributes:
        outlet: The outlet.
    """

    def __init__(self, outlet: Outlet, stream: IO[str]):
        self.outlet, self._stream = outlet, stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.outlet.write(bytes(data))
        return len(data)

    def flush(self) -> None:
        if not self.closed:
            self.outlet.drain()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()
