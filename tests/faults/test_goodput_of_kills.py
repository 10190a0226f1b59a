"""A run with a process that is killed again and again: every second is booked, and every kill is on the run's page."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from panax.metrics.goodput import read_life

TESTS = Path(__file__).parents[1]
KILLS, STEPS = 10, 4000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "panax", *arguments]


def test_ten_kills(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")} | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    flags = ["--processes", "2", "--devices", "1", "--directory", str(tmp_path), "--num-steps", str(STEPS)]
    flags += [
        "--checkpoint.every",
        "20",
        "--log-every",
        "10",
        "--evaluate.every",
        "500",
        "--max-restarts",
        str(2 * KILLS),
    ]
    job = subprocess.Popen(
        command("launch", str(TESTS / "tiny_recipe.py"), *flags), env=environment, stderr=subprocess.PIPE, text=True
    )
    seed = random.Random(20)
    killed, furthest, began = [], 0, 0.0
    try:
        while len(killed) < KILLS:
            assert job.poll() is None, job.stderr.read()
            status = steps_of(tmp_path)
            # In a later attempt, and after some steps of it.
            if status is None or status["attempt"] != len(killed) + 1 or status["step"] <= furthest:
                time.sleep(0.2)
                continue
            time.sleep(seed.uniform(0.0, 3.0))
            began = began or psutil.Process(status["processes"][0]["pid"]).create_time()
            victim = seed.choice(status["processes"])
            os.kill(victim["pid"], signal.SIGKILL)
            killed.append(victim["process"])
            furthest = status["step"]
        while (status := steps_of(tmp_path)) is None or status["attempt"] <= KILLS or status["step"] <= furthest:
            assert job.poll() is None, job.stderr.read()
            time.sleep(0.2)
        subprocess.run(command("stop", str(tmp_path)), env=environment, check=True, timeout=60)
        _, said = job.communicate(timeout=120)
    finally:
        job.kill()
    # The first process's last report.
    ended = (tmp_path / "metrics.jsonl").stat().st_mtime
    assert job.returncode in (0, 143), said

    life = read_life(tmp_path)
    assert len(life.sessions) == KILLS + 1 and life.sessions[-1].end in ("done", "stopped by SIGTERM")
    assert all(each.failed and each.restart_seconds > 0 for each in life.sessions[:-1])
    assert sum(life.seconds.values()) == pytest.approx(life.wall_seconds)
    assert life.wall_seconds == pytest.approx(ended - began, rel=0.01)
    for mine, theirs in zip(life.sessions, life.sessions[1:]):
        assert mine.lost_steps == max(0, (mine.last_step or 0) - theirs.first_step)
    incidents = [json.loads(line) for line in (tmp_path / "job/incidents.jsonl").read_text().splitlines()]
    assert len({each["attempt"] for each in incidents}) == KILLS

    page = tmp_path / "report.html"
    subprocess.run(command("report", str(tmp_path), "--rate", "2"), env=environment, check=True, timeout=60)
    text = " ".join(re.sub(r"<[^>]+>", " ", page.read_text()).split())
    assert text.count("was killed by SIGKILL") >= KILLS and f"Each of the {KILLS} with its message" in text


def steps_of(folder: Path) -> dict | None:
    try:
        return json.loads((folder / "job/status.json").read_text())
    except (OSError, ValueError):
        return None
