"""`log.txt` in a run's folder: its terminal output with timestamps."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console

from .console import ConsoleTracker, open_console

NAME = "log.txt"

WIDTH = 140
"""Columns of a step's report."""


class RunLog:
    """The log of one session. Lines wait until the run's folder belongs to this session; if the disk refuses
    them, they are lost.

    Attributes:
        say: Called with a run's notes.
        tracker: Tracker of its reports.
    """

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._path: Path | None = None
        self._at_start = True
        console = Console(
            file=cast(IO[str], self),
            width=WIDTH,
            markup=False,
            emoji=False,
            highlight=False,
            soft_wrap=True,
            no_color=True,
            # In a notebook Rich takes every console for the notebook's own.
            force_jupyter=False,
        )
        said, tracker = open_console(console)
        self.say: Callable[[str], None] = said
        self.tracker = tracker if isinstance(tracker, ConsoleTracker) else ConsoleTracker(console)

    def open(self, folder: Path) -> None:
        """Write to a run's folder from now on, beginning with the waiting lines."""
        self._path = folder / NAME
        text, self._waiting = "".join(self._waiting), []
        self._append(text)

    def write(self, text: str) -> int:
        """Write text, like a file."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S  ")
        marked = []
        for line in text.splitlines(keepends=True):
            marked.append((stamp if self._at_start else "") + line)
            self._at_start = line.endswith("\n")
        if self._path is None:
            self._waiting += marked
        else:
            self._append("".join(marked))
        return len(text)

    def flush(self) -> None:
        """Do nothing: each line is written at once."""

    def isatty(self) -> bool:
        """Return False."""
        return False

    def _append(self, text: str) -> None:
        assert self._path is not None
        with contextlib.suppress(OSError):
            if text and not self._path.is_symlink():
                with open(self._path, "a", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(text)


def tee(first: Callable[[str], Any], second: Callable[[str], Any]) -> Callable[[str], None]:
    """Return a function that sends a line to two functions, to the second even if the first raises."""

    def say(line: str) -> None:
        try:
            first(line)
        finally:
            second(line)

    return say
