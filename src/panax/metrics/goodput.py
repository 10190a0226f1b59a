"""Use of a run's time: every second counted once, over all of its sessions. Read from the run's ledger; no
jax.

A session is one process's work on the run, from its start to its end or death, or the part of it up to a
rollback: there the run returns to an earlier step, in the same process. `Ledger` writes the files that are read
here.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import DataError
from ..system import json_reader

FILE = "goodput.jsonl"

IDLE = "idle"
"""Kind of the time in which no process was running, which no share counts."""

KINDS: tuple[str, ...] = (
    "training", "start", "compile", "data wait", "checkpoint wait", "evaluation", "lost work", "restart", IDLE,
)  # fmt: skip
"""Kinds of time.

training: steps that are part of the result. start: a session's time before its first step, and at its end.
compile: tracing and compiling. data wait: the devices were idle. checkpoint wait: the loop waited for a copy
or for the store. evaluation: on held-out data, including hooks and samples that follow it. lost work: steps
that were repeated later, with their waits. restart: from a failure, a rollback or a change of layout until the
steps continue. idle: no process was running.
"""

ROLLED_BACK = "rolled back"
"""End of a session in which the run returned to an earlier step."""

_ROLLED_BACK = (ROLLED_BACK, "rewound")
"""That end, and its word in ledgers of version 0.1.1."""

_OF_STEPS = ("training", "data wait", "checkpoint wait", "evaluation")


@dataclasses.dataclass(frozen=True)
class Interval:
    """One line of the ledger.

    Attributes:
        begin: Start in seconds since the epoch, like `end`.
        step: Number of steps taken at its end; None until the session begins its steps.
        seconds: Seconds by kind; their sum is `end - begin`.
        gap: For a session's first interval: the kind of the time between the previous session and this one.
        word: How the session ended, with its last interval; otherwise empty.
        joules: Energy used by the devices that report it; None if none does.
        joules_of: Description of these devices.
    """

    session: int
    begin: float
    end: float
    step: int | None
    seconds: Mapping[str, float]
    gap: str = ""
    word: str = ""
    joules: float | None = None
    joules_of: str = ""


@dataclasses.dataclass(frozen=True)
class Session:
    """One process's work on the run.

    Attributes:
        first_step: Number of steps taken when its steps began; None if they did not, like `last_step`.
        end: "done", "stopped by SIGTERM" and the like, "rolled back", "refused: ..." by a mistake in its
            settings, "error: ..."; empty if it left no record of its end, or is still running.
        lost_steps: Number of its steps that a later session repeated.
        lost_seconds: Time of those steps.
        restart_seconds: From its end until the next session's first step, if it failed or the job got a new
            layout.
        idle_seconds: From its end until the next session began, if no process was running.
    """

    number: int
    began: float
    ended: float
    first_step: int | None
    last_step: int | None
    end: str
    seconds: Mapping[str, float]
    lost_steps: int = 0
    lost_seconds: float = 0.0
    restart_seconds: float = 0.0
    idle_seconds: float = 0.0
    joules: float | None = None
    joules_of: str = ""

    @property
    def failed(self) -> bool:
        """Return True if the session ended with an error, or left no record of its end; the last session may
        still be running."""
        return self.end == "" or self.end.startswith("error")

    @property
    def rolled_back(self) -> bool:
        """Return True if the session ended because the run returned to an earlier step."""
        return self.end in _ROLLED_BACK


@dataclasses.dataclass(frozen=True)
class Life:
    """Life of a run so far.

    Attributes:
        seconds: Seconds by kind; their sum is `wall_seconds`.
        spans: (kind, begin, end) of consecutive spans, without gaps. Inside an interval of the ledger, about
            ten seconds, the order is unknown.
    """

    seconds: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    sessions: tuple[Session, ...] = ()
    spans: tuple[tuple[str, float, float], ...] = ()

    @property
    def wall_seconds(self) -> float:
        """Return the time from the first session's beginning to the last one's end."""
        return self.sessions[-1].ended - self.sessions[0].began if self.sessions else 0.0

    @property
    def goodput(self) -> float:
        """Return the share of the time spent on steps of the result; idle time is not counted."""
        total_seconds = self.wall_seconds - self.seconds[IDLE]
        return self.seconds["training"] / total_seconds if total_seconds > 0 else 0.0


def read_life(folder: str | Path) -> Life:
    """Read the life of the run in a folder; empty if it has no ledger.

    Raises:
        DataError: The ledger can't be read.
    """
    return summarize_life(read_intervals(folder))


def read_intervals(folder: str | Path) -> list[Interval]:
    """Read the lines of a run's ledger, oldest first; a line truncated by a crash is skipped.

    Raises:
        DataError: The ledger can't be read.
    """
    path = Path(folder) / FILE
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"can't read {path}: {error}; it is the run's ledger, which its owner can read") from error
    intervals: list[Interval] = []
    for line in lines:
        interval = _interval(line)
        # Sessions and their intervals are consecutive: anything else is not part of this ledger.
        if interval is not None and (
            not intervals or (interval.session >= intervals[-1].session and interval.begin >= intervals[-1].end - 0.01)
        ):
            intervals.append(interval)
    return intervals


def _interval(line: str) -> Interval | None:
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        fields = json_reader.parse(line, constants=True)
        begin, end, step = float(fields["from"]), float(fields["to"]), fields["step"]
        seconds = {str(kind): float(value) for kind, value in fields["seconds"].items()}
        usable = all(map(math.isfinite, (begin, end, *seconds.values()))) and set(seconds) <= set(KINDS)
        if usable and end >= begin and (step is None or type(step) is int) and type(fields["session"]) is int:
            joules = fields.get("joules")
            return Interval(
                fields["session"], begin, end, step, seconds,
                fields["gap"] if fields.get("gap") in KINDS else "",
                str(fields.get("end", "")),
                float(joules) if joules is not None else None,
                str(fields.get("joules_of", "")),
            )  # fmt: skip
    return None


def summarize_life(intervals: Sequence[Interval], resumed_at: int | None = None) -> Life:
    """Compute a run's life from the lines of its ledger.

    Args:
        resumed_at: Number of steps at which a further session begins, if any.
    """
    groups: dict[int, list[Interval]] = {}
    for interval in intervals:
        groups.setdefault(interval.session, []).append(interval)
    totals = dict.fromkeys(KINDS, 0.0)
    sessions: list[Session] = []
    spans: list[tuple[str, float, float]] = []
    resumed_step = math.inf if resumed_at is None else resumed_at
    # From the last one back: the steps of a session that count depend on where later ones resumed.
    for number, lines in reversed(groups.items()):
        session, own_spans = _session(number, lines, resumed_step)
        if sessions:
            session, between = _with_gap(session, sessions[-1], groups[sessions[-1].number][0].gap)
            spans = [*own_spans, *between, *spans]
            for kind, begin, end in between:
                totals[kind] += end - begin
        else:
            spans = own_spans
        for kind, seconds in session.seconds.items():
            totals[kind] += seconds
        sessions.append(session)
        resumed_step = min(resumed_step, math.inf if session.first_step is None else session.first_step)
    return Life(totals, tuple(reversed(sessions)), tuple(_merged(spans)))


def _session(
    number: int, lines: Sequence[Interval], resumed_step: int | float
) -> tuple[Session, list[tuple[str, float, float]]]:
    """Return a session and its spans; steps beyond `resumed_step`, at which the run continued, were lost."""
    totals: dict[str, float] = {}
    spans: list[tuple[str, float, float]] = []
    before: int | None = None
    first: int | None = None
    word = lines[-1].word
    for line in lines:
        seconds, share = (
            dict(line.seconds),
            _lost_share(before, line.step, resumed_step, failed=not word or "error" in word or word in _ROLLED_BACK),
        )
        if share:
            # At `resumed_step` itself, everything except training counts too, such as its checkpoint.
            kinds = _OF_STEPS if line.step != resumed_step else _OF_STEPS[:1]
            lost = {kind: share * seconds[kind] for kind in kinds if kind in seconds}
            seconds |= {kind: seconds[kind] - value for kind, value in lost.items()}
            seconds["lost work"] = seconds.get("lost work", 0.0) + sum(lost.values())
        at = line.begin
        scale = (line.end - line.begin) / total_seconds if (total_seconds := sum(seconds.values())) > 0 else 0.0
        for kind in KINDS:
            # Rounded when written: the parts of an interval must sum to its length.
            value = seconds.get(kind, 0.0) * scale
            if value > 0:
                totals[kind] = totals.get(kind, 0.0) + value
                spans.append((kind, at, at + value))
                at += value
        first = line.step if first is None else first
        before = line.step
    joules = [line.joules for line in lines if line.joules is not None]
    return Session(
        number, lines[0].begin, lines[-1].end, first, before, word, totals,
        lost_steps=0 if before is None else int(max(0, before - max(resumed_step, first or 0))),
        lost_seconds=totals.get("lost work", 0.0),
        joules=sum(joules) if joules else None,
        joules_of=next((line.joules_of for line in lines if line.joules_of), ""),
    ), spans  # fmt: skip


def _lost_share(before: int | None, after: int | None, resumed_step: int | float, *, failed: bool) -> float:
    """Return the share of an interval's steps, from `before` to `after`, that is beyond `resumed_step`."""
    if before is None or after is None or after < resumed_step:
        return 0.0
    if before >= resumed_step and after > before:
        return 1.0
    if after == before:
        # No step was completed: work on one that a failed session did not complete, or beyond `resumed_step`.
        return 1.0 if before > resumed_step or (before == resumed_step and failed) else 0.0
    return max(0.0, after - resumed_step) / (after - before)


def _with_gap(session: Session, following: Session, gap: str) -> tuple[Session, list[tuple[str, float, float]]]:
    seconds = following.began - session.ended
    restart = (seconds if gap == "restart" else 0.0) + following.seconds.get("restart", 0.0)
    with_times = dataclasses.replace(
        session,
        restart_seconds=restart if session.failed or session.rolled_back or gap == "restart" else 0.0,
        idle_seconds=0.0 if gap == "restart" else seconds,
    )
    return with_times, [(gap or IDLE, session.ended, following.began)] if seconds > 0 else []


def _merged(spans: Iterable[tuple[str, float, float]]) -> Iterable[tuple[str, float, float]]:
    last: tuple[str, float, float] | None = None
    for span in spans:
        if last is not None and span[0] == last[0]:
            last = (last[0], last[1], span[2])
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def describe_life(life: Life) -> str:
    """Format one line for users: the goodput, and the use of the remaining time, largest first.

    >>> describe_life(Life({**dict.fromkeys(KINDS, 0.0), "training": 90.0, "compile": 6.0, "start": 4.0},
    ...     (Session(1, 0.0, 100.0, 0, 10, "done", {}),)))
    'goodput 90 % of 1 min 40 s: compile 6.0 s, start 4.0 s'
    """
    rest = sorted(((life.seconds[kind], kind) for kind in KINDS[1:] if life.seconds[kind] >= 0.05), reverse=True)
    spent = ", ".join(f"{kind} {format_seconds(seconds)}" for seconds, kind in rest)
    total_seconds = life.wall_seconds - life.seconds[IDLE]
    return f"goodput {life.goodput:.0%} of {format_seconds(total_seconds)}".replace("%", " %") + (
        f": {spent}" if spent else ""
    )


def format_seconds(seconds: float) -> str:
    """Format a duration in at most two units.

    >>> [format_seconds(each) for each in (0.14, 9.96, 75.0, 3660.0, 200000.0)]
    ['0.1 s', '10 s', '1 min 15 s', '1 h 1 min', '2 d 7 h']
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rounded_seconds = round(seconds)
    for unit, below, size in (("d", "h", 86400), ("h", "min", 3600), ("min", "s", 60)):
        if rounded_seconds >= size:
            rest = rounded_seconds % size // {"d": 3600, "h": 60, "min": 1}[unit]
            return f"{rounded_seconds // size} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{rounded_seconds} s"


def life_scalars(life: Mapping[str, float]) -> dict[str, Any]:
    """Convert seconds by kind to the names of a run's log.

    >>> life_scalars({"training": 3.0, "data wait": 1.0, "idle": 5.0})
    {'goodput/training_seconds': 3.0, 'goodput/data_wait_seconds': 1.0, 'goodput/idle_seconds': 5.0, 'goodput/fraction': 0.75}
    """
    named = {f"goodput/{kind.replace(' ', '_')}_seconds": round(seconds, 3) for kind, seconds in life.items()}
    total_seconds = sum(life.values()) - life.get(IDLE, 0.0)
    return {
        **named,
        "goodput/fraction": round(life.get("training", 0.0) / total_seconds, 5) if total_seconds > 0 else 0.0,
    }
