"""Stop requests to a supervisor by signals: a coordinated save, or an immediate end."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Request to end a job.

    Attributes:
        signal: The signal of the first request; None while there is none.
        at_once: True if nothing is to be saved: after a second Ctrl-C.
        by_system: True if the first request was a signal other than Ctrl-C, so not from a user: an engine may
            start the job again.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.at_once = False
        self.by_system = False

    def request(self, number: signal.Signals, *, by_system: bool = False) -> None:
        """Request a coordinated save, unless one was requested.

        >>> asks = StopRequest()
        >>> asks.request(signal.SIGTERM, by_system=True); asks.request(signal.SIGINT)
        >>> asks.signal.name, asks.by_system
        ('SIGTERM', True)
        """
        if self.signal is None:
            self.signal, self.by_system = number, by_system

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handle signals as requests within the context: a coordinated save, or an immediate end after a
        second Ctrl-C."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.signal is not None and number == signal.SIGINT:
                self.at_once = True
            self.request(signal.Signals(number), by_system=number != signal.SIGINT)

        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
        # An ignored SIGHUP stays ignored, as under `nohup`.
        numbers = [n for n in signals if not (n == signal.SIGHUP and signal.getsignal(n) is signal.SIG_IGN)]
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
