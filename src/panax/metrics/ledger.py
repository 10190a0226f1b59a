"""Ledger of a run's time: its first process records the use of each second, even up to a kill.

`goodput.jsonl` in the run's folder has a line for each interval of the run's life: its session, its beginning
and end, the steps taken at its end, and the seconds by kind, which sum to its length. The last line of the
file is overwritten while its interval continues, at most once a second: a process that is killed leaves all
but its last moments.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .energy import EnergyMeter
from .goodput import FILE, IDLE, ROLLED_BACK, life_scalars, read_intervals, summarize_life

MIN_WRITE_SECONDS = 1.0
"""Minimum time between two writes of a continuing interval."""

INTERVAL_SECONDS = 10.0
"""Minimum length of an interval, except at a saved checkpoint: steps inside it count as equally long."""

_SAVED_SECONDS = 0.2
_MOST_WORDS = 300
_WRITE_SECONDS = 10.0

Put = Callable[..., Any]


class Ledger:
    """Records of one session, by one thread. At any time one kind of time is active, set by `switch` and
    `during`.

    Attributes:
        word: How the session ends, once known: "done", "stopped by SIGTERM".

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ledger = Ledger(Path(folder), time.time())
    ...     ledger.begin_steps(0)
    ...     with ledger.measure("evaluation"): time.sleep(0.01)
    ...     ledger.close("done")
    ...     ledger.scalars()["goodput/evaluation_seconds"] >= 0.01
    True
    """

    def __init__(
        self,
        folder: Path | None,
        began: float,
        *,
        attempt: int = 1,
        goes_on: bool = False,
        compiled: Callable[[], float] = lambda: 0.0,
        put: Put | None = None,
        energy: EnergyMeter | None = None,
    ):
        """Begin a session.

        Args:
            folder: The run's folder; None records nothing, as in all processes except the first.
            began: Start of this session, in seconds since the epoch.
            attempt: Index of this start among those of its supervisor; the time between two starts counts
                toward the second.
            goes_on: True if the previous session ended only to get a new layout, by the same supervisor.
            compiled: Returns the seconds that this process has spent on compiling.
            put: Calls functions soon, in order, so that a slow disk blocks nothing; by default at once.
            energy: Meter of the devices' energy.

        Raises:
            DataError: The ledger of earlier sessions can't be read.
        """
        self.word = ""
        self._folder = folder
        self._earlier = [] if folder is None else read_intervals(folder)
        life = summarize_life(self._earlier)
        last = life.sessions[-1] if life.sessions else None
        failed = last is not None and (last.failed or goes_on)
        self._session = 1 if last is None else last.number + 1
        self._gap = "" if last is None else "restart" if failed and attempt > 1 else IDLE
        # A clock that was set back, or that of another host, must not make two sessions overlap.
        self._from = began if last is None else max(began, last.ended)
        self._gap_seconds = 0.0 if last is None else self._from - last.ended
        self._past = life.seconds
        # From here on by the monotonic clock.
        self._zero = self._from - time.monotonic() + max(time.time() - self._from, 0.0)
        self._kind = "restart" if failed else "start"
        self._since = self._from
        self._open: dict[str, float] = {}
        self._own: dict[str, float] = {}
        self._step: int | None = None
        self._written = 0.0
        self._begins = True
        self._energy = energy
        self._compiled, self._compiled_before = compiled, compiled()
        self._put: Put = put or (lambda function, *arguments: function(*arguments))
        self._file = None if folder is None else _File(folder / FILE)
        self._write()

    def switch(self, kind: str) -> str:
        """Count the time from now on as `kind`; return the previous kind."""
        self._book()
        before, self._kind = self._kind, kind
        if self._since - self._written >= MIN_WRITE_SECONDS:
            self._write()
        return before

    @contextlib.contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Count the time inside the context as `kind`."""
        before = self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    @contextlib.contextmanager
    def measure_data_wait(self, finished: Callable[[], Any]) -> Iterator[None]:
        """Count as "data wait" the part of a wait for data in which the devices were idle.

        Args:
            finished: Returns when the devices have finished their work. Called by another thread.
        """
        done: list[float] = []

        def watch() -> None:
            # Errors of the step are raised where its results are read.
            with contextlib.suppress(Exception):
                finished()
            done.append(self._now())

        begin = self._now()
        threading.Thread(target=watch, name="panax-devices", daemon=True).start()
        try:
            yield
        finally:
            if done:
                self.reassign(self._now() - max(done[0], begin), "data wait")

    def reassign(self, seconds: float, to: str) -> None:
        """Move up to `seconds` of the current kind in the current interval to another kind."""
        self._book()
        moved = min(max(seconds, 0.0), self._open.get(self._kind, 0.0))
        for book in (self._open, self._own):
            book[self._kind] = book.get(self._kind, 0.0) - moved
            book[to] = book.get(to, 0.0) + moved

    def begin_steps(self, step: int) -> None:
        """Begin the steps of the session, after `step` steps: an earlier session's work beyond them is
        lost."""
        self._past = summarize_life(self._earlier, resumed_at=step).seconds
        self._step = step
        self.reassign(self._compiled() - self._compiled_before, "compile")
        self.switch("training")
        self._next()

    def roll_back(self) -> None:
        """End the session and begin another one, because the run returns to an earlier step in this
        process."""
        self._book()
        self._write(ROLLED_BACK, last=True)
        self._wait()
        if self._folder is not None:
            self._earlier = read_intervals(self._folder)
        self._session += 1
        self._from, self._open, self._own, self._begins = self._since, {}, {}, True
        self._gap, self._gap_seconds, self._kind = "", 0.0, "restart"
        self._step, self._compiled_before = None, self._compiled()
        self._past = summarize_life(self._earlier).seconds
        self._write()

    def _wait(self) -> None:
        """Wait until pending lines are written, with a timeout, in case a disk does not answer."""
        done = threading.Event()
        self._put(done.set)
        done.wait(_WRITE_SECONDS)

    @property
    def has_begun(self) -> bool:
        """Return True if the session has begun its steps."""
        return self._step is not None

    def record_step(self, step: int, *, saved: bool = False) -> None:
        """Record that `step` steps are taken: the interval ends, if it is long enough."""
        self._book()
        self._step = step
        if self._since - self._from >= (_SAVED_SECONDS if saved else INTERVAL_SECONDS):
            self._next()
        elif self._since - self._written >= MIN_WRITE_SECONDS:
            self._write()

    def scalars(self) -> dict[str, float]:
        """Return the seconds of the whole run so far, by kind, under the names of its log, and the
        goodput."""
        self._book()
        totals = {kind: seconds + self._own.get(kind, 0.0) for kind, seconds in self._past.items()}
        if self._gap:
            totals[self._gap] += self._gap_seconds
        return life_scalars(totals)

    def close(self, word: str = "") -> None:
        """End the session.

        Args:
            word: How the session ends; by default the attribute `word`.
        """
        self._book()
        self._write(" ".join((word or self.word or "ended").split())[:_MOST_WORDS], last=True)

    def _now(self) -> float:
        return self._zero + time.monotonic()

    def _book(self) -> None:
        time_now = self._now()
        for book in (self._open, self._own):
            book[self._kind] = book.get(self._kind, 0.0) + time_now - self._since
        self._since = time_now

    def _next(self) -> None:
        self._write(last=True)
        self._from, self._open, self._begins = self._since, {}, False

    def _write(self, word: str = "", *, last: bool = False) -> None:
        self._written = self._since
        if self._file is None:
            return
        line: dict[str, Any] = {
            "session": self._session,
            "from": round(self._from, 4),
            "to": round(self._since, 4),
            "step": self._step,
            "seconds": {kind: round(seconds, 4) for kind, seconds in self._open.items() if seconds > 0},
        }
        if self._begins and self._gap:
            line["gap"] = self._gap
        if word:
            line["end"] = word
        if self._energy is not None and last:
            line |= self._energy.take()
        self._put(self._file.write, json.dumps(line).encode(), last)


class _File:
    """File of lines; the last line is overwritten until it is final."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None
        self._offset = self._room = 0

    def write(self, line: bytes, last: bool) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._offset = os.fstat(self._descriptor).st_size
            if self._offset and os.pread(self._descriptor, 1, self._offset - 1) != b"\n":
                # A line truncated by a crash remains a separate line.
                self._offset += os.pwrite(self._descriptor, b"\n", self._offset)
        padded = line.ljust(self._room) + b"\n"
        os.pwrite(self._descriptor, padded, self._offset)
        self._room = len(padded) - 1
        if last:
            self._offset, self._room = self._offset + len(padded), 0

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
