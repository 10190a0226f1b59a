"""`Outlet`: text for a person, a pipe or a browser, written by a thread, so that one who does not read holds up no work."""

import contextlib
import os
import threading
import time
from collections import deque
from typing import IO

MOST_WAITING = 1 << 20
"""Characters that may wait to be read; further lines are left out, and counted, until there is room."""


class Outlet:
    """What is written to a stream, in its order. A stream that has gone takes nothing more, and is no error."""

    def __init__(self, stream: IO[str], most_waiting: int = MOST_WAITING):
        """
        Args:
            stream: One without a descriptor (of a test, a notebook) is written to at once.
        """
        self._stream, self._most = stream, most_waiting
        self._texts: deque[str] = deque()
        self._waiting = self._left_out = 0
        self._changed = threading.Condition()
        self._closed = self._busy = False
        self.gone = False
        try:
            self._descriptor: int | None = stream.fileno()
        except (AttributeError, OSError, ValueError):
            self._descriptor = None
        if self._descriptor is not None:
            # A daemon: who does not read must not keep the process.
            threading.Thread(target=self._run, name="panax-outlet", daemon=True).start()

    def write(self, text: str) -> None:
        """Write text soon; never waits, never raises."""
        if self._descriptor is None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                self.gone = True
            return
        with self._changed:
            if self._waiting + len(text) > self._most:
                self._left_out += max(text.count("\n"), 1)
                return
            if self._left_out:
                text = f"... {self._left_out:,} lines are left out, which nobody read in time\n{text}"
                self._left_out = 0
            self._texts.append(text)
            self._waiting += len(text)
            self._changed.notify_all()

    def close(self, seconds: float = 2.0) -> None:
        """Wait until all is written, but not for long."""
        deadline = time.monotonic() + seconds
        with self._changed:
            if self._left_out and not self.gone:
                self._texts.append(f"... {self._left_out:,} lines are left out, which nobody read in time\n")
                self._left_out = 0
            self._closed = True
            self._changed.notify_all()
            while (self._texts or self._busy) and self._descriptor is not None and not self.gone:
                if not self._changed.wait(max(deadline - time.monotonic(), 0.0)):
                    return

    def _run(self) -> None:
        # What the stream itself has in its buffer comes first.
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._texts or self._closed)
                if not self._texts:
                    return
                text = self._texts.popleft()
                self._waiting -= len(text)
                self._busy = True
            self._put(text.encode(getattr(self._stream, "encoding", None) or "utf-8", "backslashreplace"))

    def _put(self, data: bytes) -> None:
        assert self._descriptor is not None
        while data and not self.gone:
            try:
                # Past the stream's own buffer: a thread that waits in there would hold its lock when the process ends.
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                time.sleep(0.05)
            except (OSError, ValueError):
                self.gone = True
