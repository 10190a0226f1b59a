"""Reports of a worker to the supervisor that started it: its phase, its progress, and the error that ends it.

Each report is a line of JSON in a pipe that the worker inherits, so that no file and no port is needed. The
worker never waits for a reader: a line that does not fit the pipe is dropped, unless it is the error. A process
without a supervisor sends nothing.
"""

import contextlib
import functools
import json
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

DESCRIPTOR = "PANAX_HEARTBEAT"
"""Environment variable with the descriptor of the inherited pipe."""

SECONDS = 0.5
"""Minimum time between two lines on progress: a pipe is not read for every step of a millisecond."""

MAX_LINE_BYTES = 4000
"""Maximum bytes of a line: a pipe takes 4096 at once or none."""


class Heartbeat:
    """Sender of the reports of one worker.

    >>> read, write = os.pipe()
    >>> beat = Heartbeat(write)
    >>> beat.phase("join"); beat.step(1); beat.step(2)  # the second of two steps within half a second is not sent
    >>> [sorted(json.loads(line)) for line in os.read(read, 4096).splitlines()]
    [['at', 'phase'], ['at', 'step']]
    """

    def __init__(self, descriptor: int | None):
        self._descriptor = descriptor
        self._sent_at = 0.0
        self._step: int | None = None
        self._phase = "start"
        if descriptor is not None:
            os.set_blocking(descriptor, False)

    @property
    def is_supervised(self) -> bool:
        """Return True if there is a supervisor."""
        return self._descriptor is not None

    def phase(self, name: str) -> None:
        """Begin a phase: join, prepare, restore, compile, steps, evaluate, save, end."""
        self._phase = name
        if self._descriptor is not None:
            self._tell(phase=name, **({} if self._step is None else {"step": self._step}))

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Enter a phase for the duration of the context, then return to the previous one."""
        before = self._phase
        self.phase(name)
        try:
            yield
        finally:
            self.phase(before)

    def report_progress(self, phase: str) -> None:
        """Report, from any thread, that the work of a phase has progressed; sends nothing while the process
        is in another phase.

        Thus a thread that writes a checkpoint does not hide that the steps are stuck.
        """
        if phase == self._phase:
            self.report_alive()

    def step(self, number: int) -> None:
        """Report that a step has been taken; the first after another phase is always sent."""
        is_first = self._phase != "steps"
        self._step, self._phase = number, "steps"
        if self._descriptor is not None and (is_first or time.monotonic() - self._sent_at >= SECONDS):
            self._sent_at = time.monotonic()
            self._tell(step=number)

    def report_saved(self, step: int) -> None:
        """Report that a checkpoint of a step is being saved."""
        if self._descriptor is not None:
            self._tell(saved=step)

    def report_alive(self) -> None:
        """Report progress without a step: a batch has arrived, or was evaluated."""
        if self._descriptor is not None and time.monotonic() - self._sent_at >= SECONDS:
            self._sent_at = time.monotonic()
            self._tell()

    def values(self, values: Mapping[str, float]) -> None:
        """Send the metrics of a step, for observers of the job; may be called from any thread.

        The message contains neither step nor phase: the run may be in a later phase when it arrives, such as a save.
        """
        if self._descriptor is not None:
            self._tell(values=dict(values))

    def facts(self, **facts: Any) -> None:
        """Send facts about this process to the supervisor, as JSON values."""
        if self._descriptor is not None:
            self._tell(facts=facts)

    def error(self, error: BaseException, message: str, exit_code: int) -> None:
        """Send the error that ends this process."""
        if self._descriptor is None:
            return
        os.set_blocking(self._descriptor, True)
        kinds = [kind.__name__ for kind in type(error).__mro__[:-2]]
        self._tell(error={"kinds": kinds[:6], "message": message[: MAX_LINE_BYTES // 2], "exit_code": exit_code})

    def _tell(self, **said: Any) -> None:
        line = json.dumps({"at": round(time.time(), 3), **said}).encode()
        if len(line) >= MAX_LINE_BYTES:
            line = json.dumps({"at": round(time.time(), 3), **dict.fromkeys(said)}).encode()
        # A supervisor that has ended is noticed elsewhere; a full pipe is read in time, or never.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._descriptor or 0, line + b"\n")


@functools.cache
def heartbeat() -> Heartbeat:
    """Return the heartbeat of this process."""
    given = os.environ.get(DESCRIPTOR, "")
    if not given.isdecimal():
        return Heartbeat(None)
    # Processes that this one starts are not the worker.
    os.set_inheritable(int(given), False)
    return Heartbeat(int(given))
