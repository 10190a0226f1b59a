"""Reader of a run's folder: the content of its files, and reasons for missing ones. Files come from other
programs and may be truncated."""

import bisect
import dataclasses
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import DataError
from ...system import json_reader
from ...system.lock import is_locked
from ..goodput import Life, Session, read_life
from .curves import Curve, StepTimes, infer_step_times, read_curves

LOG, LEDGER, SESSIONS, ACCOUNT = "metrics.jsonl", "goodput.jsonl", "sessions.jsonl", "data_account.json"
ROLLBACKS, QUESTIONS = "rollbacks.jsonl", "questions.json"
JOB, STATUS, INCIDENTS = "job/job.json", "job/status.json", "job/incidents.jsonl"
FINDINGS = "job/findings.jsonl"
RUN_MARKER_FILES = (LOG, LEDGER, SESSIONS, JOB)
"""A folder without any of them is not a run's."""

LOCK_FILE = ".lock"
"""Locked by the training process as long as it lives."""

FRESH_SECONDS, FRESH_STEPS = 90.0, 5
"""Age, in seconds and in steps, from which unchanged files are not those of a continuing run."""

SUPERVISED_SECONDS = 20.0
"""Maximum time between two writes of a supervisor."""

Facts = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """Content of a run's files.

    Attributes:
        name: Name of the run, made distinct if several runs of a report share it.
        sessions: Lines of `sessions.jsonl`, oldest first.
        session_facts: Lines of `sessions.jsonl` for the ledger's sessions, by session number.
        counts: Number of devices of the ledger's sessions, by session number; unknown ones are missing.
        life: Life according to the ledger; None if the run has none.
        times: Times of steps; None if unknown.
        energy: (joules, their source); None if the devices don't report energy.
        job, status: The supervisor's files; empty if the run was not launched by one.
        incidents: Incidents recorded by the supervisor, oldest first.
        findings: Hosts and links found to be slow, or recovered.
        rollbacks: Returns of the run to an earlier step, oldest first.
        questions: Newest scores on questions, with answers; empty if the run asks none.
        alive: True if the run is in progress.
        unread: Number of unreadable lines of each file that has any.
    """

    folder: Path
    name: str
    curves: Mapping[str, Curve]
    sessions: Sequence[Facts]
    session_facts: Mapping[int, Facts]
    counts: Mapping[int, int]
    life: Life | None
    times: StepTimes | None
    energy: tuple[float | int, str] | None
    job: Facts
    status: Facts
    incidents: Sequence[Facts]
    findings: Sequence[Facts]
    rollbacks: Sequence[Facts]
    account: Facts
    questions: Facts
    alive: bool
    unread: Mapping[str, int]

    @property
    def facts(self) -> Facts:
        """Return the facts of the newest session."""
        return self.sessions[-1] if self.sessions else {}

    @property
    def last_step(self) -> int | None:
        """Return the last step that is known to have been taken."""
        steps = [int(curve.x[-1]) for curve in self.curves.values()]
        if self.life is not None and self.life.sessions:
            steps += [session.last_step for session in self.life.sessions[-1:] if session.last_step is not None]
        if not steps and (step := number(self.status, "step")) is not None and step >= 0:
            steps.append(int(step))
        return max(steps, default=None)

    @property
    def num_steps(self) -> int | None:
        """Return the number of steps that the run is to take."""
        count = number(self.facts, "num_steps") or number(self.status, "num_steps")
        return None if count is None else int(count)

    def session(self, session: Session) -> Facts:
        """Return the facts of a session; empty if it ended before it wrote any."""
        return self.session_facts.get(session.number, {})

    def devices(self, session: Session) -> int | None:
        """Return the number of devices of a session; if it recorded none, that of the previous session."""
        return self.counts.get(session.number)


def read_run(folder: str | Path) -> RunFiles:
    """Read a run's folder.

    Raises:
        DataError: The folder is not a run's; or a file can't be read.
    """
    path = Path(folder)
    _check(path)
    unread: dict[str, int] = {}
    try:
        curves: dict[str, Curve] = {}
        if (path / LOG).is_file():
            curves, unread[LOG] = read_curves(path / LOG)
        sessions, unread[SESSIONS] = _lines(path / SESSIONS)
        ledger, unread[LEDGER] = _lines(path / LEDGER)
        findings, unread[FINDINGS] = _lines(path / FINDINGS)
        incidents, unread[INCIDENTS] = _lines(path / INCIDENTS)
        rollbacks, unread[ROLLBACKS] = _lines(path / ROLLBACKS)
        life = read_life(path) if ledger else None
    except OSError as error:
        raise DataError(f"can't read the run in {path}: {error}; check that its files are readable") from error
    if life is not None and not life.sessions:
        life = None
    job, status = _object(path / JOB), _object(path / STATUS)
    newest = sessions[-1] if sessions else {}
    session_facts = _match_sessions(sessions, life)
    name = next((text(facts, "name") for facts in (newest, job) if text(facts, "name")), path.resolve().name)
    return RunFiles(
        folder=path,
        name=name,
        curves=curves,
        sessions=sessions,
        session_facts=session_facts,
        counts=_devices_by_session(session_facts, life),
        life=life,
        times=_times(ledger, life) if life is not None else infer_step_times(curves),
        energy=_energy(life),
        job=job,
        status=status,
        incidents=_newest_incidents(incidents),
        findings=findings,
        rollbacks=rollbacks,
        account=_object(path / ACCOUNT),
        questions=_object(path / QUESTIONS),
        alive=_alive(path, curves, life, newest, status),
        unread={name: count for name, count in unread.items() if count},
    )


def number(facts: Facts, name: str) -> float | int | None:
    """Return the number under a key; None if it is missing or not finite."""
    value = facts.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return value


def text(facts: Facts, name: str) -> str:
    """Return the text under a key; empty if it is missing or not a text."""
    value = facts.get(name)
    return value if isinstance(value, str) else ""


def mapping(facts: Facts, name: str) -> Facts:
    """Return the object under a key; empty if it is missing or not an object."""
    value = facts.get(name)
    return value if isinstance(value, Mapping) else {}


def _alive(path: Path, curves: Mapping[str, Curve], life: Life | None, facts: Facts, status: Facts) -> bool:
    """Return True if a run is in progress, judging by its lock, by its supervisor or, if the lock may be held on
    another host, by the age of its files."""
    if is_locked(path / LOCK_FILE):
        return True
    written = number(status, "at") or 0.0
    if "end" not in status and time.time() - written < SUPERVISED_SECONDS:
        return True
    ended = "end" in status or (life is not None and life.sessions[-1].end != "")
    if ended or ((path / LOCK_FILE).is_file() and facts.get("hosts") == [socket.gethostname()]):
        return False
    last_modified = max(
        (path / name).stat().st_mtime for name in (LOG, LEDGER, SESSIONS, JOB) if (path / name).is_file()
    )
    step = curves["seconds/step"].median if "seconds/step" in curves else None
    return time.time() - last_modified < max(FRESH_SECONDS, FRESH_STEPS * (step or 0.0))


def _check(path: Path) -> None:
    if not path.is_dir():
        reason = "it is a file" if path.exists() else "there is no such folder"
        raise DataError(f"expected a run's folder, as runs/NAME, and got {path}: {reason}{_runs_in(path.parent)}")
    if not any((path / name).is_file() for name in RUN_MARKER_FILES):
        raise DataError(
            f"{path} is not a run's folder: it has none of {', '.join(RUN_MARKER_FILES)}; pass the folder that "
            "`panax train` or `panax "
            f"launch` has written, as runs/NAME{_runs_in(path)}"
        )


def _runs_in(path: Path) -> str:
    """Return a clause that lists the runs in a folder; empty if there are none."""
    try:
        run_folders = sorted(
            str(each)
            for each in path.iterdir()
            if each.is_dir() and any((each / name).is_file() for name in RUN_MARKER_FILES)
        )
    except OSError:
        return ""
    return (
        f"; there are {', '.join(run_folders[:8])}{' and more' if len(run_folders) > 8 else ''}" if run_folders else ""
    )


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return (the objects in a file's lines, number of complete lines that could not be read); a truncated
    last line is skipped."""
    objects: list[dict[str, Any]] = []
    unread = 0
    if not path.is_file():
        return objects, unread
    with open(path, "rb") as file:
        for line in file:
            try:
                row = json_reader.parse(line, constants=True)
            except ValueError:
                row = None
            if isinstance(row, dict):
                objects.append(row)
            elif line.endswith(b"\n") and line.strip():
                unread += 1
    return objects, unread


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json_reader.read(path, constants=True)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _newest_incidents(incidents: Sequence[Facts]) -> list[Facts]:
    """Return the newest line of each incident: the supervisor writes a second one after measuring the cost of
    the recovery."""
    newest: dict[tuple[float | int, float | int], Facts] = {}
    for one in incidents:
        at = number(one, "at")
        if at is not None:
            newest[at, number(one, "attempt") or 0] = one
    return [newest[key] for key in sorted(newest)]


def _match_sessions(facts: Sequence[Facts], life: Life | None) -> dict[int, Facts]:
    """Match facts to the ledger's sessions, by number or by time."""
    sessions = life.sessions if life is not None else ()
    begins = [session.began for session in sessions]
    facts_by_session: dict[int, Facts] = {}
    for one in facts:
        at, named = number(one, "at"), number(one, "session")
        n = -1 if at is None else bisect.bisect_right(begins, at) - 1
        if n >= 0 and named in (None, sessions[n].number):
            facts_by_session.setdefault(sessions[n].number, one)
    return facts_by_session


def _devices_by_session(session_facts: Mapping[int, Facts], life: Life | None) -> dict[int, int]:
    """Return the number of devices of each session; a session that did not record it had as many as the
    previous one.

    Initial sessions without a record, which may have been killed before writing one, had as many as the first
    session with one.
    """
    device_counts: dict[int, int] = {}
    last: int | None = None
    sessions = life.sessions if life is not None else ()
    for session in sessions:
        if session.number in session_facts:
            count = number(mapping(session_facts[session.number], "devices"), "count")
            last = None if count is None or count < 1 else int(count)
        if last is not None:
            if not device_counts and not any(each < session.number for each in session_facts):
                device_counts |= {each.number: last for each in sessions if each.number < session.number}
            device_counts[session.number] = last
    return device_counts


def _anchors(ledger: Sequence[Facts], life: Life) -> Iterator[tuple[float | int, float | int]]:
    """Yield (step, time at which it had been taken), session by session."""
    lines: dict[int, list[tuple[float | int, float | int]]] = {session.number: [] for session in life.sessions}
    for line in ledger:
        of, step, until = (number(line, name) for name in ("session", "step", "to"))
        if of in lines and step is not None and until is not None:
            lines[int(of)].append((step, until))
    for session in life.sessions:
        if session.first_step is not None:
            yield session.first_step, session.began
        yield from lines[session.number]


def _times(ledger: Sequence[Facts], life: Life) -> StepTimes | None:
    steps: list[float | int] = []
    seconds: list[float | int] = []
    began = life.sessions[0].began
    for step, at in _anchors(ledger, life):
        while steps and steps[-1] > step:
            # Repeated: the last time counts.
            steps.pop()
            seconds.pop()
        steps.append(step)
        seconds.append(at - began)
    return StepTimes(np.asarray(steps, np.float64), np.asarray(seconds, np.float64), True) if steps else None


def _energy(life: Life | None) -> tuple[float | int, str] | None:
    measured = [session for session in life.sessions if session.joules is not None] if life is not None else []
    if not measured:
        return None
    of = (
        ", ".join(dict.fromkeys(session.joules_of for session in measured if session.joules_of))
        or "devices that are not named"
    )
    return sum(session.joules or 0.0 for session in measured), of
