"""Records of a run's steps: scalars, and the settings and environment of the sessions that took them."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import CheckpointError, DataError
from ...system import json_reader
from ..reporting.history import METRICS_FILE, read_history
from ..reporting.session import SESSIONS_FILE

PREFIX = "train/"
"""Prefix of the scalars of a step in a run's log."""

COMPARED = ("loss", "gradient_norm", "parameter_norm")
"""Scalars of a step that a replay is compared by, if both have them: each depends on every bit of the step before."""


@dataclasses.dataclass(frozen=True)
class ScalarComparison:
    """A scalar that a run has recorded, and the one of the replay.

    Attributes:
        ulps: Number of float32 values between them; 0 if both are NaN, None if one of them is not finite.
    """

    step: int
    name: str
    recorded: float
    replayed: float
    ulps: int | None

    @property
    def is_equal(self) -> bool:
        return self.ulps == 0


def count_ulps(first: float, second: float) -> int | None:
    """Return how many float32 values lie between two numbers; None if just one is not finite, or both are and differ.

    >>> count_ulps(1.0, 1.0), count_ulps(1.0, float(np.nextafter(np.float32(1), np.float32(2)))), count_ulps(math.nan, 1.0)
    (0, 1, None)
    """
    if math.isnan(first) and math.isnan(second):
        return 0
    if not (math.isfinite(first) and math.isfinite(second)):
        return 0 if first == second else None
    ordered = []
    for value in (first, second):
        bits = int(np.float32(value).view(np.int32))
        # Negative values count down from zero.
        ordered.append(bits if bits >= 0 else -(bits & 0x7FFFFFFF))
    # A value that is not of float32 at all, as after an edit, differs even if it rounds to the same one.
    return abs(ordered[0] - ordered[1]) or int(first != second)


def compare_scalars(step: int, recorded: Mapping[str, Any], replayed: Mapping[str, float]) -> list[ScalarComparison]:
    """Compare the scalars of a step with those that the run has recorded; empty if it has recorded none."""
    found = []
    for name in COMPARED:
        value = recorded.get(f"{PREFIX}{name}")
        if name in replayed and isinstance(value, int | float):
            found.append(
                ScalarComparison(step, name, float(value), replayed[name], count_ulps(float(value), replayed[name]))
            )
    return found


@dataclasses.dataclass(frozen=True)
class RunSession:
    """A process, or a job of several, that took steps of a run.

    Attributes:
        first_step: Steps taken before.
        facts: Its line in `sessions.jsonl`.
    """

    first_step: int
    facts: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RunRecords:
    """The records of a run.

    Attributes:
        scalars: By step, those in the log.
        sessions: Oldest first.
    """

    folder: Path
    scalars: Mapping[int, Mapping[str, Any]]
    sessions: Sequence[RunSession]

    @property
    def last_step(self) -> int:
        """Return the last step in the log; 0 if it has none."""
        return max((step for step, row in self.scalars.items() if f"{PREFIX}loss" in row), default=0)

    def session_of(self, step: int) -> RunSession | None:
        """Return the session that took a step: the last one that began before it."""
        begun = [session for session in self.sessions if session.first_step < step]
        return begun[-1] if begun else None

    def next_recorded(self, step: int, within: int) -> int | None:
        """Return the first step at or after `step` with a recorded loss, at most `within` steps later."""
        later = (each for each in range(step, step + within + 1) if f"{PREFIX}loss" in self.scalars.get(each, {}))
        return next(later, None)


def read_records(folder: Path) -> RunRecords:
    """Read the records in a run's folder.

    A truncated last line of a file, as of a run that is writing at this moment, is dropped.

    Raises:
        CheckpointError: The folder is not one of a run.
        DataError: A file can't be read, or holds a line that is not a run's.
    """
    if not (folder / METRICS_FILE).is_file() and not (folder / SESSIONS_FILE).is_file():
        raise CheckpointError(
            f"{folder} is not the folder of a run: it has neither {METRICS_FILE} nor {SESSIONS_FILE}; name one like runs/NAME"
        )
    for name in (METRICS_FILE, SESSIONS_FILE):
        if (folder / name).is_symlink():
            raise CheckpointError(f"{folder / name} is a link, which is not followed; expected a run's own file")
    rows = {row["step"]: row for row in read_history(folder)}
    return RunRecords(folder, rows, _read_sessions(folder / SESSIONS_FILE))


def _read_sessions(path: Path) -> tuple[RunSession, ...]:
    if not path.exists():
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    sessions = []
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            facts = json_reader.parse(line, constants=True)
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from error
        first = facts.get("first_step") if isinstance(facts, dict) else None
        if type(first) is not int or first < 0:
            raise DataError(f"{path}, line {number} has no first_step; expected the facts of a session")
        sessions.append(RunSession(first, facts))
    return tuple(sessions)
