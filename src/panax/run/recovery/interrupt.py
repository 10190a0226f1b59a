"""Signals that end a run, as a flag that the loop reads between two steps; in a job of many processes, at the
same step in all.

On SIGINT (Ctrl-C), SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, and SIGHUP unless it is ignored, as under nohup, the
run saves and ends. Before the first step there is nothing to save, and it ends within seconds. A second
signal, a second later or more, ends it at once. docs/launch/index.md has the table.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

import jax

from ...job.heartbeat import heartbeat
from ...system.streams import write_last_words

RESPONSE_SECONDS = 8.0
"""Time for the main thread to answer a signal if there is nothing new to save: otherwise it is blocked by a
compiler or a file system."""

DEBOUNCE_SECONDS = 1.0
"""Interval below which two signals count as one: some batch systems signal a process and its group."""

_NAMES = ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")

# Windows has few of these; a run ends there before it begins, with a message.
HANDLED_SIGNALS = tuple(signal.Signals[name] for name in _NAMES if name in signal.Signals.__members__)


class SignalHandler:
    """Context manager in which the first signal that ends a run sets a flag, and a second one raises
    KeyboardInterrupt.

    Attributes:
        signal: The signal by which the run stops, or None. With many processes, they have agreed on a step: a
            signal that arrives at a process after the last step does not count.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._has_news = False
        self._came: signal.Signals | None = None
        self._came_at = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._asked = 0
        self._answered = threading.Event()
        self._wake: tuple[int, int] | None = None

    def __enter__(self) -> "SignalHandler":
        # With many processes, JAX's coordination service handles SIGTERM and finds a step at which all can
        # stop.
        handled_signals = [*HANDLED_SIGNALS, *([signal.SIGTERM] if jax.process_count() == 1 else [])]
        # Python delivers signals to the main thread only; elsewhere the caller's handlers stay.
        if threading.current_thread() is threading.main_thread():
            for number in handled_signals:
                if signal.getsignal(number) is signal.SIG_IGN and number == signal.SIGHUP:
                    continue
                self._before[number] = signal.signal(number, self._handle)
            # An interactive session is not ended.
            typed = hasattr(sys, "ps1") or "ipykernel" in sys.modules
            # With many processes, the supervisor ends those that it has started.
            if not typed and (jax.process_count() == 1 or not heartbeat().is_supervised):
                self._watch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answered.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._wake is not None:
            writing, before = self._wake
            signal.set_wakeup_fd(before)
            os.close(writing)  # its reader ends, and closes the other end

    def record_step(self) -> None:
        """Record that a step was taken that no checkpoint has."""
        self._has_news = True

    def should_stop(self) -> bool:
        """Return True to stop before the next step: the same answer in every process of the job, each of
        which calls this at each step."""
        if jax.process_count() > 1:
            if self.signal is not None:
                return True
            from jax.experimental import multihost_utils

            # Not the step number, which decreases when a run rolls back.
            self._asked += 1
            if multihost_utils.reached_preemption_sync_point(self._asked):
                self.signal = self._came or signal.SIGTERM
                self._answered.set()
                return True
            return False
        if self.signal is not None:
            self._answered.set()
        return self.signal is not None

    def should_abandon_wait(self) -> bool:
        """Return True to stop although the next step's data has not arrived; with many processes none may do
        so alone."""
        if self.signal is not None:
            self._answered.set()
        return self.signal is not None and jax.process_count() == 1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        time_now = time.monotonic()
        # In a launched worker, the batch system's signal and the supervisor's belong to one request.
        again = time_now - self._came_at >= DEBOUNCE_SECONDS and not heartbeat().is_supervised
        if self._came is not None and (number == signal.SIGINT or again):
            raise KeyboardInterrupt
        self._came, self._came_at = signal.Signals(number), time_now
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.signal = self._came

    def _watch(self) -> None:
        """Start a thread that handles signals at once, also while the main thread is in a compiler, where
        Python runs no handler."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        try:
            before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        except ValueError:
            os.close(reading)
            os.close(writing)
            return
        self._wake = (writing, before)
        threading.Thread(target=self._wait, args=(reading, before), name="panax-signals", daemon=True).start()

    def _wait(self, reading: int, before: int) -> None:
        handled_signals = {int(number) for number in self._before}
        try:
            while numbers := os.read(reading, 64):
                if before >= 0:
                    # Forward to whatever waited for signals before.
                    with contextlib.suppress(OSError):
                        os.write(before, numbers)
                received_signals = [number for number in numbers if number in handled_signals]
                if (
                    received_signals
                    and not self._has_news
                    and not self._answered.wait(RESPONSE_SECONDS)
                    and not self._has_news
                ):
                    name = signal.Signals(received_signals[0]).name
                    write_last_words(f"panax: ended by {name} with nothing new to save; checkpoints are as they were\n")
                    os._exit(128 + received_signals[0])
        finally:
            os.close(reading)
