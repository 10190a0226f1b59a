"""The ledger of a run's seconds: where its first process books what each of them was spent on, also up to a kill.

`goodput.jsonl` in the run's folder has a line for each interval of the run's life: which session it is of, from when to when, the
steps taken at its end, and the seconds by kind, which add up to its length. The last line of the file is written over as its
interval goes on, at most once a second: a process that is killed leaves all but its last moments.
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
from .goodput import FILE, ROLLED_BACK, life_scalars, read_intervals, summarize_life

MIN_WRITE_SECONDS = 1.0
"""The least time between two writings of an interval that goes on."""

INTERVAL_SECONDS = 10.0
"""An interval does not end before, but where a checkpoint was saved: steps inside of it count as equally long."""

_SAVED_SECONDS = 0.2
_MOST_WORDS = 300
_WRITE_SECONDS = 10.0

Put = Callable[..., Any]


class Ledger:
    """One session's bookings, by one thread. At any time it is in one kind of second; `switch` and `during` say which.

    Attributes:
        word: How the session ends, as soon as that is known: "done", "stopped by SIGTERM".

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ledger = Ledger(Path(folder), time.time())
    ...     ledger.begin_steps(0)
    ...     with ledger.during("evaluation"): time.sleep(0.01)
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
        """
        Args:
            folder: The run's; None books nothing, as in all processes but the first.
            began: When this session did, in seconds since the epoch.
            attempt: Which start by the same supervisor this is: what lies between two of its starts was spent on the second.
            goes_on: Whether the session before ended only to get a new layout, by the same supervisor.
            compiled: The seconds that this process has spent on compiling.
            put: Calls a function soon, and several in their order, so that a slow disk holds nothing up; by default at once.
            energy: What tells the devices' energy.

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
        self._gap = "" if last is None else "restart" if failed and attempt > 1 else "idle"
        # A clock that went back, or that of another host, must not let two sessions overlap.
        self._from = began if last is None else max(began, last.ended)
        self._gap_seconds = 0.0 if last is None else self._from - last.ended
        self._past = life.seconds
        # From here on by the clock that never goes back.
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
        """Spend what follows on `kind`; returns what was before."""
        self._book()
        before, self._kind = self._kind, kind
        if self._since - self._written >= MIN_WRITE_SECONDS:
            self._write()
        return before

    @contextlib.contextmanager
    def measure(self, kind: str) -> Iterator[None]:
        """Spend what is inside on `kind`."""
        before = self.switch(kind)
        try:
            yield
        finally:
            self.switch(before)

    @contextlib.contextmanager
    def measure_data_wait(self, finished: Callable[[], Any]) -> Iterator[None]:
        """Spend on "data wait" the part of a wait for data in which the devices had nothing to do.

        Args:
            finished: Returns when the devices are done with what they were given. Another thread calls it.
        """
        done: list[float] = []

        def watch() -> None:
            # What went wrong in the step is raised where its figures are read.
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
        """Book some of the present interval's seconds of the present kind as another: at most as many as there are."""
        self._book()
        moved = min(max(seconds, 0.0), self._open.get(self._kind, 0.0))
        for book in (self._open, self._own):
            book[self._kind] = book.get(self._kind, 0.0) - moved
            book[to] = book.get(to, 0.0) + moved

    def begin_steps(self, step: int) -> None:
        """The session goes on after `step` steps: what an earlier one has done beyond them is lost work."""
        self._past = summarize_life(self._earlier, resumed_at=step).seconds
        self._step = step
        self.reassign(self._compiled() - self._compiled_before, "compile")
        self.switch("training")
        self._next()

    def roll_back(self) -> None:
        """The run goes back to an earlier step, inside of this process: its session ends here, and another one begins."""
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
        """Wait until what was put is written; not for long, where a disk does not answer."""
        done = threading.Event()
        self._put(done.set)
        done.wait(_WRITE_SECONDS)

    @property
    def has_begun(self) -> bool:
        """Whether the session has come to its steps."""
        return self._step is not None

    def record_step(self, step: int, *, saved: bool = False) -> None:
        """`step` steps are taken: an interval ends, if it is long enough."""
        self._book()
        self._step = step
        if self._since - self._from >= (_SAVED_SECONDS if saved else INTERVAL_SECONDS):
            self._next()
        elif self._since - self._written >= MIN_WRITE_SECONDS:
            self._write()

    def scalars(self) -> dict[str, float]:
        """The seconds of the whole run so far, by kind, as its log names them, and the goodput."""
        self._book()
        whole = {kind: seconds + self._own.get(kind, 0.0) for kind, seconds in self._past.items()}
        if self._gap:
            whole[self._gap] += self._gap_seconds
        return life_scalars(whole)

    def close(self, word: str = "") -> None:
        """The session ends.

        Args:
            word: How, where that is not what `word` says already.
        """
        self._book()
        self._write(" ".join((word or self.word or "ended").split())[:_MOST_WORDS], last=True)

    def _now(self) -> float:
        return self._zero + time.monotonic()

    def _book(self) -> None:
        now = self._now()
        for book in (self._open, self._own):
            book[self._kind] = book.get(self._kind, 0.0) + now - self._since
        self._since = now

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
    """Lines of which the last one is written over until it is final."""

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None
        self._offset = self._room = 0

    def write(self, line: bytes, last: bool) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._offset = os.fstat(self._descriptor).st_size
            if self._offset and os.pread(self._descriptor, 1, self._offset - 1) != b"\n":
                # A line that a crash has cut short stays one.
                self._offset += os.pwrite(self._descriptor, b"\n", self._offset)
        padded = line.ljust(self._room) + b"\n"
        os.pwrite(self._descriptor, padded, self._offset)
        self._room = len(padded) - 1
        if last:
            self._offset, self._room = self._offset + len(padded), 0

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
