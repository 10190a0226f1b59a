"""`panax status`, `logs`, `stop` for a run started by `panax train` or a script, based on the files in its
folder."""

import os
import signal
import time
from pathlib import Path

from ...core.errors import LaunchError
from ...metrics.goodput import format_seconds
from ...metrics.report.run_files import LOCK_FILE, SESSIONS, RunFiles, read_run
from ...metrics.report.run_files import LOG as FIGURES
from ...metrics.run_log import NAME
from ...system.lock import signal_owner
from ..tails import follow, print_escaped, read_last_lines

SHOWN_METRICS = ("train/loss", "evaluation/loss", "speed/mfu", "seconds/step")

FOLLOW_SECONDS = 0.5


def is_plain(run: str | Path) -> bool:
    """Return True if a folder is that of a run without a supervisor."""
    folder = Path(run)
    return (
        any((folder / name).is_file() for name in (SESSIONS, FIGURES, NAME)) and not (folder / "job/job.json").is_file()
    )


def status(run: str) -> int:
    """Print the state of a run, or how it ended."""
    run_files = read_run(run)
    session = run_files.life.sessions[-1] if run_files.life is not None else None
    step, steps = run_files.last_step, run_files.num_steps
    of = f" of {steps:,}" if steps else ""
    at = f"step {step:,}{of}" if step is not None else "before the first step"
    state = "trains" if run_files.alive else _end(session.end if session is not None else "")
    seconds = f", after {format_seconds(run_files.life.wall_seconds)}" if run_files.life is not None else ""
    print_escaped(f"{run_files.name}: {state}, {at}{seconds}")
    command = run_files.facts.get("command")
    if isinstance(command, list):
        print_escaped(f"  {' '.join(map(str, command))}")
    figures = [
        f"{name.removeprefix('train/')} {value:,.4g}"
        for name in SHOWN_METRICS
        if (value := _last(run_files, name)) is not None
    ]
    if run_files.life is not None:
        figures.append(f"goodput {run_files.life.goodput:.0%}")
    if figures:
        print_escaped(f"  {', '.join(figures)}")
    if not run_files.alive and step is not None and steps and step < steps:
        print_escaped("  the same command again resumes it from its last checkpoint")
    return 0


def _last(run: RunFiles, name: str) -> float | None:
    curve = run.curves.get(name)
    return None if curve is None or curve.last is None else float(curve.last)


def _end(end: str) -> str:
    if not end:
        return "ended without a message (killed, or its host is gone)"
    return "done" if end == "done" else f"ended: {end}"


def logs(run: str, lines: int, *, following: bool) -> int:
    """Print the last lines of a run's log, and new ones until it ends."""
    path = Path(run) / NAME
    if not path.is_file():
        raise LaunchError(f"{path} not found: the run was trained by an older Panax, which kept no log")
    last_lines, offset = read_last_lines(path, lines)
    for line in last_lines:
        print_escaped(line)
    while following:
        alive = read_run(run).alive
        offset = follow(path, offset, None, last=not alive)
        if not alive:
            break
        time.sleep(FOLLOW_SECONDS)
    return 0


def stop(run: str, seconds: float) -> int:
    """Make a run save, and end.

    Raises:
        LaunchError: The run has ended, or is on another host.
    """
    folder = Path(run)
    if not read_run(folder).alive:
        raise LaunchError(f"{run} does not run now; `panax status {run}` shows how it ended")
    hindrance = signal_owner(folder / LOCK_FILE, signal.SIGTERM)
    if hindrance:
        raise LaunchError(f"{run} can't be stopped from here: {hindrance}")
    print("asked it to save and to end; waiting for that", flush=True)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        run_files = read_run(folder)
        if not run_files.alive:
            step = run_files.last_step
            print_escaped(f"ended{f' after step {step:,}' if step is not None else ''}")
            return 0
        time.sleep(FOLLOW_SECONDS)
    raise LaunchError(f"the run has not ended within {seconds:.0f} s; see {os.path.join(run, NAME)}")
