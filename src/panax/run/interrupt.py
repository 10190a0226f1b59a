"""Ctrl-C and SIGTERM as a flag that the loop reads between two steps."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """While it is entered, the first SIGINT or SIGTERM sets a flag; a second SIGINT raises KeyboardInterrupt at once.

    Attributes:
        signal: The signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        # Python delivers signals to the main thread only; elsewhere the caller's own handling stays.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
