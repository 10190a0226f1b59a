"""`panax launch --islands N`: N jobs, each with a supervisor and a folder, that synchronize in one
folder."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from ...core.errors import LaunchError
from ...system.outlet import Outlet

OUTER_SYNC_FOLDER = "outer_sync"
LINE_CHARACTERS, LAST_WORDS_SECONDS = 1 << 16, 5.0
_OWN = ("--comms.islands.count", "--comms.islands.index")


def launch_islands(recipe: str, flags: Sequence[str], folder: Path, count: int, only: int | None) -> int:
    """Start the islands of a run, and monitor them until all have ended. A final failure of one does not stop
    the others.

    Args:
        flags: Flags of `panax launch`, except those for islands.
        folder: The run's folder; each island has a folder in it.
        only: Start only this island, to restart it.

    Returns:
        0 if all have succeeded, else the exit code of one that has not.

    Raises:
        LaunchError: The flags can't be used for islands.
    """
    if count < 2 or (only is not None and not 0 <= only < count):
        raise LaunchError(
            f"--islands {count}{'' if only is None else f' --island {only}'}: expected 2 or more, counted from 0"
        )
    conflicts = [flag for flag in flags if flag.partition("=")[0].replace("_", "-") in _OWN]
    if conflicts:
        raise LaunchError(f"{conflicts[0]} is set by --islands for each island; remove it")
    if "--fresh" in flags and only is None:
        _archive(folder / OUTER_SYNC_FOLDER)
    indices = range(count) if only is None else [only]
    jobs = {index: _start(recipe, island_flags(flags, folder, count, index)) for index in indices}
    outlet, errors = Outlet(sys.stdout), Outlet(sys.stderr)
    tellers = [
        threading.Thread(target=_forward_output, args=(job.stdout, index, outlet), daemon=True)
        for index, job in jobs.items()
    ]
    for teller in tellers:
        teller.start()

    stopped = threading.Event()

    def passed_on(number: int, frame: FrameType | None) -> None:
        stopped.set()
        for job in jobs.values():
            if job.poll() is None:
                job.send_signal(number)

    before = {
        number: signal.signal(number, passed_on)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    }
    try:
        codes = _wait_for_jobs(jobs, stopped, errors)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for teller in tellers:
        teller.join(LAST_WORDS_SECONDS)  # a process that an island has left behind may hold its pipe
    outlet.close()
    errors.close()
    return max(codes.values())


def island_flags(flags: Sequence[str], folder: Path, count: int, index: int) -> list[str]:
    """Return the flags of one island's job, from the flags of all islands."""
    own = ["--comms.islands.count", str(count), "--comms.islands.index", str(index)]
    if not any(flag.partition("=")[0] == "--comms.islands.store" for flag in flags):
        own += ["--comms.islands.store", str(folder / OUTER_SYNC_FOLDER)]
    return [*without_directory(flags), *own, "--directory", str(folder / f"island_{index}")]


def _start(recipe: str, flags: Sequence[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "panax", "launch", recipe, *flags]
    # In a separate session: Ctrl-C only reaches this process, which passes it on once.
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def _wait_for_jobs(
    jobs: "dict[int, subprocess.Popen[str]]", stopped: threading.Event, errors: Outlet
) -> dict[int, int]:
    """Wait until all jobs have ended; return their exit codes.

    Args:
        stopped: Set once the jobs were asked to end.
        errors: Outlet of messages for the user.
    """
    codes: dict[int, int] = {}
    while len(codes) < len(jobs):
        for index, job in jobs.items():
            if index in codes:
                continue
            try:
                code = job.wait(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
            codes[index] = code if code >= 0 else 128 - code
            if code and len(codes) < len(jobs) and not stopped.is_set():
                errors.write(
                    f"panax: island {index} ended with exit code {codes[index]}; the others continue, and the same command with "
                    f"--island {index} brings it back\n"
                )
    return codes


def _forward_output(lines: IO[str] | None, index: int, outlet: Outlet) -> None:
    # Read even if the output is not read: an island would block otherwise.
    if lines is not None:
        for line in iter(lambda: lines.readline(LINE_CHARACTERS), ""):
            outlet.write(f"island {index} | {line.rstrip()}\n")


def _archive(folder: Path) -> None:
    """Rename the folder of an earlier run's islands, to preserve its files."""
    if not folder.exists():
        return
    number = next(n for n in range(1, 10_000) if not folder.with_name(f"{folder.name}.{n}").exists())
    folder.rename(folder.with_name(f"{folder.name}.{number}"))


def without_directory(flags: Sequence[str]) -> list[str]:
    """Return the flags without the run's directory.

    >>> without_directory(["--directory", "a", "--seed", "3", "--directory=b"])
    ['--seed', '3']
    """
    remaining, is_directory_value = [], False
    for flag in flags:
        if is_directory_value:
            is_directory_value = False
        elif flag == "--directory":
            is_directory_value = True
        elif not flag.startswith("--directory="):
            remaining.append(flag)
    return remaining
