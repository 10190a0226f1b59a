"""`Outlet`: text for a terminal, a pipe or a browser, written by a thread, so that a reader who does not read
does not block any work."""

import contextlib
import errno
import os
import threading
import time
from collections import deque
from typing import IO

MAX_PENDING_BYTES = 1 << 20
"""Maximum bytes that wait to be written; further lines are dropped, and counted, until there is space."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Outlet:
    """Ordered output to a stream. If the reader is gone, output is discarded; on a full disk, some is lost.
    Neither raises an error."""

    def __init__(self, stream: IO[str], max_waiting: int = MAX_PENDING_BYTES):
        """Start the thread that writes.

        Args:
            stream: If it has no descriptor (in a test, a notebook), it is written to immediately.
        """
        self._stream, self._most = stream, max_waiting
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._texts: deque[bytes] = deque()
        self._waiting = self._left_out = 0
        self._changed = threading.Condition()
        self._closed = self._busy = self._held = False
        self.gone = False
        try:
            self._descriptor: int | None = stream.fileno()
        except (AttributeError, OSError, ValueError):
            self._descriptor = None
        if self._descriptor is not None:
            # A daemon thread: a reader who does not read must not prevent the process from ending.
            threading.Thread(target=self._run, name="panax-outlet", daemon=True).start()

    def write(self, text: str | bytes) -> None:
        """Write text, or bytes in the stream's encoding, soon; never blocks, never raises."""
        if self._descriptor is None:
            try:
                self._stream.write(text if isinstance(text, str) else text.decode(self._encoding, "backslashreplace"))
                self._stream.flush()
            except (OSError, ValueError):
                self.gone = True
            return
        data = text.encode(self._encoding, "backslashreplace") if isinstance(text, str) else text
        with self._changed:
            if self._waiting + len(data) > self._most:
                self._left_out += max(data.count(b"\n"), 1)
                return
            self._add(self._left_out_line() + data)

    def _add(self, data: bytes) -> None:
        if data:
            self._texts.append(data)
            self._waiting += len(data)
            self._changed.notify_all()

    def _left_out_line(self) -> bytes:
        count, self._left_out = self._left_out, 0
        return b"... %s lines are left out, which nobody read in time\n" % f"{count:,}".encode() if count else b""

    def drain(self, seconds: float = 0.1) -> None:
        """Wait briefly until pending text is written, so that later output follows it; returns at once while
        the stream is blocked."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while (self._texts or self._busy) and self._descriptor is not None and not self.gone and not self._held:
                if not self._changed.wait(max(deadline - time.monotonic(), 0.0)):
                    self._held = True

    def close(self, seconds: float = 2.0) -> None:
        """Wait until everything is written, up to a time limit."""
        deadline = time.monotonic() + seconds
        with self._changed:
            if not self.gone:
                self._add(self._left_out_line())
            self._closed = True
            self._changed.notify_all()
            while (self._texts or self._busy) and self._descriptor is not None and not self.gone:
                if not self._changed.wait(max(deadline - time.monotonic(), 0.0)):
                    return

    def _run(self) -> None:
        # The content of the stream's buffer comes first.
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()
        while True:
            with self._changed:
                self._busy = False
                self._held = self._held and bool(self._texts)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._texts or self._closed)
                if not self._texts:
                    return
                data = b"".join(self._texts)
                self._texts.clear()
                self._waiting = 0
                self._busy = True
            self._put(data)

    def _put(self, data: bytes) -> None:
        assert self._descriptor is not None
        while data and not self.gone:
            try:
                # Past the stream's buffer: a thread that waits in there would hold its lock when the process
                # ends.
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                time.sleep(0.05)
            except OSError as error:
                if error.errno in _FULL:
                    return
                self.gone = True
