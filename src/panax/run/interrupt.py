"""Ctrl-C, SIGTERM and a closed terminal as a flag that the loop reads between two steps; in a job of many processes, the same
step for all."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import jax


class Interrupt:
    """While it is entered, the first SIGINT, SIGTERM or SIGHUP sets a flag; a second SIGINT raises KeyboardInterrupt at once.

    SIGHUP stays ignored where it is, as under `nohup`.

    Attributes:
        signal: The signal by which the run stops, or None. Of many processes, they have agreed on a step: one that came to a
            process after the last step is none.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._came: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._asked = 0

    def __enter__(self) -> "Interrupt":
        # Of many processes, JAX's coordination service takes SIGTERM and finds a step at which all can stop.
        taken = [signal.SIGINT, signal.SIGHUP] + ([signal.SIGTERM] if jax.process_count() == 1 else [])
        # Python delivers signals to the main thread only; elsewhere the caller's own handling stays.
        if threading.current_thread() is threading.main_thread():
            for number in taken:
                if signal.getsignal(number) is signal.SIG_IGN and number == signal.SIGHUP:
                    continue
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def due(self) -> bool:
        """Whether to stop before the next step: the same answer in every process of the job, each of which asks at each step."""
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            # Not the number of the step, which goes down where a run goes back.
            self._asked += 1
            if multihost_utils.reached_preemption_sync_point(self._asked):
                self.signal = self._came or signal.SIGTERM
                return True
            return False
        return self.signal is not None

    def gives_up_waiting(self) -> bool:
        """Whether to stop although the data for the next step has not come; of many processes none may do so alone."""
        return self.signal is not None and jax.process_count() == 1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._came = signal.Signals(number)
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.signal = self._came
