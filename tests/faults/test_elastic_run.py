"""A run that loses a node, continues with three and takes the fourth in again ends bitwise as one with planned changes."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from panax.checkpoint import open_checkpoint
from panax.cluster.supervisor.job_folder import read_incidents
from panax.cluster.supervisor.job_layout import JobLayout

TESTS = Path(__file__).parents[1]
RECIPE = str(Path(__file__).with_name("elastic_recipe.py"))
STEPS = 300
FLAGS = (
    "--num-steps",
    str(STEPS),
    "--checkpoint.every",
    "20",
    "--checkpoint.keep-last",
    "99",
    "--evaluate.every",
    "0",
    "--log-every",
    "1",
)
WHOLE = ("--mesh.replica", "2", "--mesh.fsdp", "2", "--devices", "1")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def started(command: str, *arguments: str, stop: int = 0) -> subprocess.Popen:
    stored = {name: value for name, value in os.environ.items() if not name.startswith(("PANAX_PROC", "XLA_"))}
    environment = stored | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "PANAX_TEST_STOP": str(stop),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "panax", command, *arguments], env=environment, stderr=subprocess.PIPE, text=True
    )


def done(job: subprocess.Popen) -> str:
    _, said = job.communicate(timeout=300)
    assert job.returncode == 0, said
    return said


def until(folder: Path, job: subprocess.Popen, running: list[int]) -> dict:
    """The job's status once it trains on these nodes."""
    end = time.monotonic() + 200
    while time.monotonic() < end:
        assert job.poll() is None, job.stderr.read()
        try:
            status = json.loads((folder / "job/status.json").read_text())
        except (OSError, ValueError):
            status = {"state": ""}
        on_them = status["state"] == "running" and status["nodes"]["running"] == running
        # Each process tells what it compiled just after its first step.
        if on_them and all("programs_compiled" in one for one in status["processes"]):
            return status
        time.sleep(0.1)
    raise AssertionError(f"the job does not run on the nodes {running}")


def digest(folder: Path, step: int) -> str:
    """Of all arrays of a checkpoint."""
    checkpoint = open_checkpoint(str(folder / f"checkpoints/step_{step:08d}"))
    found = hashlib.sha256()
    for name in sorted(checkpoint.manifest.arrays):
        found.update(name.encode() + checkpoint.read(name).tobytes())
    return found.hexdigest()


def test_shrunk_and_grown_again(tmp_path):
    folder, planned = tmp_path / "run", tmp_path / "planned"
    job = started("launch", RECIPE, "--nodes", "4", "--processes", "4", "--directory", str(folder), *WHOLE, *FLAGS)
    try:
        until(folder, job, [0, 1, 2, 3])
        # The one that has process 0 is as good as any other.
        done(started("cordon", str(folder), "0"))
        until(folder, job, [1, 2, 3])
        done(started("uncordon", str(folder), "0"))
        again = until(folder, job, [0, 1, 2, 3])
        done(job)
    finally:
        job.kill()
    shrunk, grown = (one["step"] for one in read_incidents(folder / "job"))
    assert 0 < shrunk < grown < STEPS

    ranked = json.loads((folder / "job/layouts.json").read_text())["layouts"]["3"]
    for count, stop, layout in (
        (4, shrunk, WHOLE),
        (3, grown, ("--devices", "1", *JobLayout.from_json(ranked[0]).flags)),
        (4, 0, WHOLE),
    ):
        nodes = ("--nodes", str(count), "--processes", str(count))
        done(started("launch", RECIPE, *nodes, "--directory", str(planned), *layout, *FLAGS, stop=stop))
    for step in (shrunk, grown, STEPS):
        assert digest(folder, step) == digest(planned, step), f"step {step}"

    # A layout that was seen before is not compiled again, in any process.
    assert [one["programs_compiled"] for one in again["processes"]] == [0] * 4
    sessions = [json.loads(line) for line in (folder / "sessions.jsonl").read_text().splitlines()]
    assert [one["processes"] for one in sessions] == [4, 3, 4]
    assert sessions[1]["mesh"] == {"replica": 3} and sessions[0]["mesh"] == sessions[2]["mesh"] == {
        "replica": 2,
        "fsdp": 2,
    }
