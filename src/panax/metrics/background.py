"""Reporting calls, made in order by a separate thread: training neither waits for them nor fails with them."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ..core.errors import PanaxError

MAX_PENDING_CALLS = 10_000
"""Maximum number of waiting calls; further ones are dropped until there is room."""

MAX_PENDING_BYTES = 64 << 20
"""Maximum size of waiting pictures, films and texts; a larger one waits alone."""

CLOSE_SECONDS = 10.0
"""Time that the end of a run waits for pending reports."""

_LOG = logging.getLogger("panax.metrics")


class BackgroundReporter:
    """A separate thread for one destination of reports: a file, a terminal, a server.

    Failures cause a single warning; later calls are still made.
    """

    def __init__(
        self,
        name: str,
        warn: Callable[[str], None] = _LOG.warning,
        *,
        threaded: bool = True,
        max_waiting: int = MAX_PENDING_CALLS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        """Start the thread.

        Args:
            name: Name of the destination in warnings.
            warn: Called with a warning; must not raise.
            threaded: False makes each call at once, in the caller's thread, for debuggers.
        """
        self._name, self._warn = name, warn
        self._max_waiting, self._close_seconds = max_waiting, close_seconds
        self._calls: deque[tuple[Callable[..., Any], tuple[Any, ...], int]] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._closed = self._failed = self._full = False
        self._lost = 0
        self._since = 0.0
        self._thread: threading.Thread | None = None
        if threaded:
            # A daemon thread: a file system that does not answer must not block the end of the process.
            self._thread = threading.Thread(target=self._run, name=f"panax-{name}", daemon=True)
            self._thread.start()

    def put(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Queue a call for the thread, which makes calls in order; never waits, never raises. After `close`,
        the call is made at once."""
        if self._thread is None or self._closed:
            self._call(function, arguments)
            return
        full, size = False, sum(map(estimate_bytes, arguments))
        with self._changed:
            if len(self._calls) >= self._max_waiting or (
                self._calls and self._waiting_bytes + size > MAX_PENDING_BYTES
            ):
                self._lost += 1
                full, self._full = not self._full, True
            else:
                self._calls.append((function, arguments, size))
                self._waiting_bytes += size
                self._changed.notify_all()
        if full:
            self._warn(f"warning: {self._name} is falling behind: some reports are dropped; training continues")

    def end(self) -> None:
        """Let the thread end after the pending calls, without waiting for it; `close` waits."""
        with self._changed:
            if not self._closed:
                self._closed, self._since = True, time.monotonic()
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for pending calls, with a timeout: a destination that does not answer is given up, with a
        warning.

        With several reporters, call `end` on each before closing the first: their timeouts then run
        concurrently.
        """
        if self._thread is None:
            return
        self.end()
        self._thread.join(max(0.0, self._since + self._close_seconds - time.monotonic()))
        num_pending = len(self._calls) + self._thread.is_alive()
        if num_pending:
            self._warn(f"warning: {self._name} does not answer: {num_pending + self._lost} reports are lost")

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closed)
                if not self._calls:
                    return
                function, arguments, size = self._calls.popleft()
                self._waiting_bytes -= size
            self._call(function, arguments)

    def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            if self._thread is None and not isinstance(error, Exception):
                raise
            self._lost += 1
            if not self._failed:
                self._failed = True
                self._warn(
                    f"warning: {self._name} can't be written, and training continues without it: {_reason(error)}"
                )


def estimate_bytes(value: Any) -> int:
    """Estimate the bytes of a value: of arrays and texts, also in lists, tuples and mappings.

    >>> estimate_bytes([b"abc", {"a": "de"}, 1.0])
    5
    """
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(estimate_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(estimate_bytes, value))
    return int(getattr(value, "nbytes", 0))


def _reason(error: BaseException) -> str:
    said = isinstance(error, PanaxError) or (isinstance(error, OSError) and error.strerror)
    return f"{error}" if said else f"{type(error).__name__}: {error}"
