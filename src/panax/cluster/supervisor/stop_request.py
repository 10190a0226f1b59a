"""What a supervisor is asked by signals: a coordinated save, or an end at once."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """Whether a job is to end.

    Attributes:
        signal: By which it was asked first; None while it is to go on.
        at_once: Whether nothing is to be saved: a second Ctrl-C.
        by_system: Whether a signal other than Ctrl-C asked first, and not a person: an engine may start the job again.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.at_once = False
        self.by_system = False

    def request(self, number: signal.Signals, *, by_system: bool = False) -> None:
        """Ask for a coordinated save, if nobody has.

        >>> asks = StopRequest()
        >>> asks.ask(signal.SIGTERM, by_system=True); asks.ask(signal.SIGINT)
        >>> asks.signal.name, asks.by_system
        ('SIGTERM', True)
        """
        if self.signal is None:
            self.signal, self.by_system = number, by_system

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """While it is entered, a signal asks for a coordinated save; a second Ctrl-C ends all at once."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.signal is not None and number == signal.SIGINT:
                self.at_once = True
            self.request(signal.Signals(number), by_system=number != signal.SIGINT)

        taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
        # SIGHUP stays ignored where it is, as under `nohup`.
        numbers = [n for n in taken if not (n == signal.SIGHUP and signal.getsignal(n) is signal.SIG_IGN)]
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
