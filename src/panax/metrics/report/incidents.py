"""Incidents of a run: the supervisor's, the run's own rollbacks, and the ledger's sessions, without
duplicates."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from panax.core.finite_stats import min_finite, sort_finite_first

from ..goodput import Session
from .run_files import Facts, RunFiles, number, text

PHASES = ("detect", "teardown", "restart", "restore", "first_step")
NO_REASON = "no message"
TAIL_LINES = 40

STEP_KINDS = ("training", "lost work")
"""Kinds of time while steps are taken."""


@dataclasses.dataclass(frozen=True)
class RunIncident:
    """A session that ended abnormally, or in which the run returned to an earlier step.

    Attributes:
        at: Time, in seconds since the epoch.
        step: The last step before it.
        lost_steps, lost_seconds: Number of steps that were repeated later, and their time; None without a
        ledger.
        restart_seconds: From its end to the first step of the next session; None if there was none.
        idle_seconds: Idle time after it.
        phases: Seconds of each part of the recovery, as measured by the supervisor.
        device_hours: Device-hours of lost work and recovery; None if unknown.
        tail: The last lines of the process that failed first.
    """

    at: float | int
    step: int | None
    cause: str
    message: str
    lost_steps: int | None = None
    lost_seconds: float | int | None = None
    restart_seconds: float | int | None = None
    idle_seconds: float | int = 0.0
    phases: Mapping[str, float | int] = dataclasses.field(default_factory=dict)
    device_hours: float | int | None = None
    process: int | None = None
    tail: Sequence[str] = ()


def list_incidents(run: RunFiles) -> list[RunIncident]:
    """List every incident of a run, oldest first."""
    sessions = list(run.life.sessions) if run.life is not None else []
    # One that ended in order to get a new layout is an incident if the supervisor recorded it.
    left = {each.number: each for each in sessions if not _ended_well(each) or each.restart_seconds > 0}
    incidents = []
    for one in run.incidents:
        at = number(one, "at") or 0.0
        before = [session for session in left.values() if session.began <= at]
        # The next session may count from the very moment of the failure: the session that ended nearest to it
        # is used.
        session = min_finite(before, key=lambda session: abs(session.ended - at), default=None)
        if session is not None:
            del left[session.number]
        started = session is not None or run.life is None
        cost = _cost(run, session, number(one, "step")) if started else _cost_of_start(run, at)
        incidents.append(_recorded_incident(one, at, cost))
        _attribute_overlap(incidents)
    newest = sessions[-1].number if sessions else None
    for session in left.values():
        if _ended_well(session):
            continue
        if session.end or session.number != newest or not run.alive:
            incidents.append(_unrecorded_incident(run, session))
    rolled_back = [session for session in sessions if session.rolled_back]
    for one in run.rollbacks:
        at = number(one, "at") or 0.0
        session = min_finite(rolled_back, key=lambda session: abs(session.ended - at), default=None)
        if session is not None:
            rolled_back.remove(session)
        incidents.append(_rollback_incident(run, one, at, session))
    incidents += map(_slowness_incident, run.findings)
    return sort_finite_first(incidents, key=lambda mishap: mishap.at)


def _slowness_incident(one: Facts) -> RunIncident:
    """Convert a finding on a host or link that became slow, or recovered: nothing failed, and no work was
    lost."""
    step = number(one, "step")
    return RunIncident(
        at=number(one, "at") or 0.0,
        step=None if step is None else int(step),
        cause=text(one, "kind") or "slow",
        message=text(one, "message"),
    )


def _rollback_incident(run: RunFiles, one: Facts, at: float | int, session: Session | None) -> RunIncident:
    step, to = number(one, "step"), number(one, "to")
    batches = one.get("batches")
    left_out = ", ".join(str(each) for each in batches) if isinstance(batches, list) else "unknown"
    without = f" and skipped batches {left_out}" if left_out else ""
    return RunIncident(
        at=at,
        step=None if step is None else int(step),
        cause="rollback" if left_out else "silent corruption",
        message=f"{text(one, 'why')}. The run went back to step {to} ({text(one, 'source')}){without}.",
        **_cost(run, session, step),
    )


def _ended_well(session: Session) -> bool:
    return bool(session.end) and not session.end.startswith("error")


def _recorded_incident(one: Facts, at: float | int, cost: Mapping[str, Any]) -> RunIncident:
    step, process = number(one, "step"), number(one, "process")
    tail = one.get("tail")
    return RunIncident(
        at=at,
        step=None if step is None or step < 0 else int(step),
        cause=text(one, "cause") or "unknown",
        message=text(one, "message"),
        phases={name: seconds for name in PHASES if (seconds := number(one, name)) is not None},
        process=None if process is None else int(process),
        tail=[str(line) for line in tail[-TAIL_LINES:]] if isinstance(tail, list) else (),
        **cost,
    )


def _unrecorded_incident(run: RunFiles, session: Session) -> RunIncident:
    end = session.end or ""
    return RunIncident(
        at=session.ended,
        step=session.last_step,
        cause="error" if end else NO_REASON,
        message=end.removeprefix("error:").strip()
        or "The process ended without a message: it was killed, or its host is gone. No supervisor followed it.",
        **_cost(run, session, session.last_step),
    )


def _cost(run: RunFiles, session: Session | None, step: int | float | None) -> dict[str, Any]:
    if session is None or run.life is None:
        return {}
    after = next((each for each in run.life.sessions if each.number > session.number), None)
    devices, later = run.devices(session), None if after is None else run.devices(after)
    hours = None
    if devices is not None and (after is None or later is not None):
        gap = (
            0.0 if after is None or session.idle_seconds else min(after.began - session.ended, session.restart_seconds)
        )
        hours = ((session.lost_seconds + gap) * devices + (session.restart_seconds - gap) * (later or 0)) / 3600
    lost = session.lost_steps
    if step is not None and after is not None and after.first_step is not None:
        # A supervisor receives the steps of the last second, which the ledger of a killed process lacks.
        lost = max(lost, int(step) - after.first_step)
    return {
        "lost_steps": lost,
        "lost_seconds": session.lost_seconds,
        "restart_seconds": None if after is None else session.restart_seconds,
        "idle_seconds": session.idle_seconds,
        "device_hours": hours,
    }


def _cost_of_start(run: RunFiles, at: float | int) -> dict[str, Any]:
    """Compute the cost of a failure before the process began its part of the ledger: from there until a step
    was taken."""
    assert run.life is not None
    after = next((session for session in run.life.sessions if session.began > at), None)
    again = next((begin for kind, begin, _ in run.life.spans if kind in STEP_KINDS and begin >= at), None)
    devices = None if after is None else run.devices(after)
    seconds = None if again is None else again - at
    hours = None if devices is None or seconds is None else devices * seconds / 3600
    return {"lost_steps": 0, "lost_seconds": 0.0, "restart_seconds": seconds, "device_hours": hours}


def _attribute_overlap(incidents: list[RunIncident]) -> None:
    """Attribute the time after the last failure to it alone, if the run had not yet recovered from the
    previous one."""
    if len(incidents) > 1:
        before, last = incidents[-2:]
        trains = before.at + (before.restart_seconds or 0.0)
        if before.device_hours is not None and last.device_hours is not None and last.at < trains:
            hours = max(0.0, before.device_hours - last.device_hours)
            incidents[-2] = dataclasses.replace(before, device_hours=hours)
