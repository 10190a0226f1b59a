"""Stage times of a measured run, read from the files in its folder, with their sources."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ...core.errors import DataError
from ...metrics.report.incidents import PHASES, RunIncident, list_incidents
from ...metrics.report.run_files import RunFiles, mapping, number, read_run

STEP_CURVE = "seconds/step"

DEFAULT_SECONDS = {"stall": 5.0, "detect": 30.0, "teardown": 10.0, "restart": 60.0, "restore": 60.0, "first_step": 90.0}
"""Default seconds for stages that a run without failures or saves has not measured."""

ASSUMED_SOURCE = "assumed"
"""Source of a stage's time."""


class GoodputFigures(NamedTuple):
    """Stage times found in a run's folder.

    Attributes:
        times: By the names of `StageTimes`' fields; unknown ones are missing.
        sources: Description of each time's source.
        notes: Remarks for their interpretation.
    """

    times: Mapping[str, float | int]
    sources: Mapping[str, str]
    notes: Sequence[str]


def read_stage_times(folder: str | Path) -> GoodputFigures:
    """Read stage times from a run's folder.

    Raises:
        DataError: The folder is not a run's, or the run has no step.
    """
    run = read_run(folder)
    times: dict[str, tuple[float | int, str]] = {}
    notes: list[str] = []
    steps = _steps(run)
    if steps is None and STEP_CURVE not in run.curves:
        raise DataError(
            f"{folder} has no step in goodput.jsonl or metrics.jsonl; pass the folder of a run that has "
            "trained, or remove RUN and give all times"
        )
    _add_steps(run, steps, times)
    _add_checkpoints(run, steps, times, notes)
    _add_recovery(list_incidents(run), times, notes)
    _add_devices(run, times)
    times |= {name: (seconds, ASSUMED_SOURCE) for name, seconds in DEFAULT_SECONDS.items() if name not in times}
    return GoodputFigures(
        {name: value for name, (value, _) in times.items()},
        {name: source for name, (_, source) in times.items()},
        notes,
    )


def _steps(run: RunFiles) -> int | None:
    """Return the number of steps of the result recorded in the ledger; None if it has none."""
    sessions = run.life.sessions if run.life is not None else ()
    begun = [session for session in sessions if session.first_step is not None and session.last_step is not None]
    if not begun:
        return None
    steps = (begun[-1].last_step or 0) - (begun[0].first_step or 0)
    return steps if steps > 0 else None


def _add_steps(run: RunFiles, steps: int | None, times: dict[str, tuple[float | int, str]]) -> None:
    if run.life is not None and steps is not None and run.life.seconds["training"] > 0:
        for name, kind in (("step", "training"), ("data_wait", "data wait"), ("evaluation", "evaluation")):
            times[name] = run.life.seconds[kind] / steps, f"goodput.jsonl, mean of {steps:,} steps"
        return
    median = run.curves[STEP_CURVE].median if STEP_CURVE in run.curves else None
    if median is not None and median > 0:
        times["step"] = median, "metrics.jsonl, median"


def _add_checkpoints(
    run: RunFiles, steps: int | None, times: dict[str, tuple[float | int, str]], notes: list[str]
) -> None:
    config = mapping(mapping(run.facts, "settings"), "checkpoint")
    every, copy_every = number(config, "every"), number(mapping(config, "memory"), "every")
    if every is not None and every >= 1:
        times["every"] = int(every), "the run's settings"
    copies = int(copy_every) if copy_every is not None and copy_every >= 1 else 0
    if copies and every is not None and every >= 1 and int(every) % copies == 0:
        times["copy_every"] = copies, "the run's settings"
    elif copies:
        notes.append(
            f"Copies in memory every {copies} steps are skipped: checkpoints are not saved at a multiple of them."
        )
        copies = 0
    if run.life is None or steps is None or every is None or every < 1 or steps < every:
        return
    waited = run.life.seconds["checkpoint wait"]
    saves = steps // int(every) + (steps // copies if copies else 0)
    plural = "" if saves == 1 else "s"
    times["stall"] = waited / saves, f"goodput.jsonl, mean over {saves:,} save{plural}"
    if copies:
        times["copy_stall"] = waited / saves, f"goodput.jsonl, mean over {saves:,} save{plural}"
        notes.append("The ledger does not separate copies in memory from checkpoints: both are given the same stall.")


def _add_recovery(mishaps: Sequence[RunIncident], times: dict[str, tuple[float | int, str]], notes: list[str]) -> None:
    recorded = [mishap for mishap in mishaps if mishap.phases]
    for name in PHASES:
        seconds = [mishap.phases[name] for mishap in recorded if name in mishap.phases]
        if seconds:
            times[name] = statistics.fmean(seconds), f"job/incidents.jsonl, mean of {len(seconds)}"
    if recorded:
        return
    restart_seconds = [mishap.restart_seconds for mishap in mishaps if mishap.restart_seconds]
    if restart_seconds:
        times["restart"] = (
            statistics.fmean(restart_seconds),
            f"goodput.jsonl, mean of {len(restart_seconds)} recoveries as a whole",
        )
        for name in PHASES:
            times.setdefault(name, (0.0, "counted in restart"))
        notes.append("No supervisor recorded the parts of a recovery: all of it is counted as restart.")


def _add_devices(run: RunFiles, times: dict[str, tuple[float | int, str]]) -> None:
    sessions = run.life.sessions if run.life is not None else ()
    count = run.devices(sessions[-1]) if sessions else number(mapping(run.facts, "devices"), "count")
    if count is not None and count >= 1:
        times["measured_devices"] = int(count), "sessions.jsonl"
