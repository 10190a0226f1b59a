"""The picture of a report: the top of the page about a run of two processes, one of which is killed twice."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from .commands import PictureError, background, run, screenshot

STEPS = 300
KILLS = (95, 190)
"""Steps after which process 1 gets SIGKILL: between two checkpoints, so that some work is lost."""

FLAGS = ("--nodes", "2", "--processes", "2", "--devices", "1", "--num-steps", str(STEPS), "--log-every", "10")
SAVES = ("--checkpoint.every", "50", "--evaluate.every", "100")
TIMEOUT = 600.0
WIDTH, HEIGHT = 1120, 1180


def draw_report(folder: Path) -> dict[str, bytes]:
    """Train `vit_digits` with two failures, and take a screenshot of its report.

    Raises:
        PictureError: The run fails, or does not end in time.
    """
    directory = folder / "two-hosts"
    with background(["-m", "panax", "launch", "vit_digits", "--directory", str(directory), *FLAGS, *SAVES]) as job:
        for attempt, step in enumerate(KILLS):
            status = _wait_for_step(job, directory, attempt, step)
            os.kill(status["processes"][1]["pid"], signal.SIGKILL)
        if job.wait(TIMEOUT):
            raise PictureError(f"the run in {directory} ended with exit code {job.returncode}")
    page = folder / "report.html"
    run(["-m", "panax", "report", str(directory), "--rate", "2.5", "--output", str(page)])
    picture = folder / "report.png"
    screenshot(page, picture, width=WIDTH, height=HEIGHT)
    return {picture.name: picture.read_bytes()}


def _wait_for_step(job: subprocess.Popen[bytes], directory: Path, attempt: int, step: int) -> dict[str, Any]:
    """Return the job's status once this attempt has taken a step."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if job.poll() is not None:
            raise PictureError(f"the run ended with exit code {job.returncode} before step {step}")
        try:
            status = json.loads((directory / "job/status.json").read_text("utf-8"))
        except (OSError, ValueError):  # Not written yet, or half.
            status = {}
        if status.get("state") == "running" and status["attempt"] > attempt and status["step"] >= step:
            return status
        time.sleep(0.1)
    raise PictureError(f"the run has not reached step {step} within {TIMEOUT:.0f} s")
