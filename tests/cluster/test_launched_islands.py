"""`panax launch --islands`: a worker that is killed is started again and joins the others, which do not stop."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from panax.checkpoint import open_checkpoint
from panax.cli.commands.islands import OUTER_SYNC_FOLDER, launch_islands
from panax.cli.main import main
from panax.core.errors import LaunchError

STEPS, LOCAL = 240, 20

RECIPE = """
import dataclasses, time
from tiny_recipe import tiny
from panax import Experiment
from panax.hooks import Hook

class Slow(Hook):
    def after_step(self, run):
        time.sleep(0.1)

def slow() -> Experiment:
    return dataclasses.replace(tiny(), name="slow", num_steps=%d, hooks=(Slow(),))
"""


def status(folder):
    try:
        return json.loads((folder / "job" / "status.json").read_text())
    except (OSError, ValueError):
        return {}


def waited(what, seconds=240.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := what():
            return found
        time.sleep(0.2)
    raise AssertionError("it did not come")


@pytest.mark.slow
def test_a_killed_island_comes_back_and_the_other_never_stops(tmp_path):
    (tmp_path / "slow.py").write_text(RECIPE % STEPS)
    flags = [
        "--islands",
        "2",
        "--devices",
        "1",
        "--comms.local-steps",
        str(LOCAL),
        "--comms.islands.wait-seconds",
        "1",
        "--no-spares",
    ]
    command = [sys.executable, "-m", "panax", "launch", "slow.py:slow", *flags, "--directory", str(tmp_path / "run")]
    tests = os.path.dirname(os.path.dirname(__file__))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    log = tmp_path / "log"
    with open(log, "w") as out:
        job = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=subprocess.STDOUT)
    islands = [tmp_path / "run" / f"island_{index}" for index in range(2)]
    try:
        killed = waited(
            lambda: (
                job.poll() is not None
                or (status(islands[1]).get("step", -1) > LOCAL and status(islands[1])["processes"][0]["pid"])
            )
        )
        assert job.poll() is None, log.read_text()[-3000:]
        os.kill(killed, signal.SIGKILL)
        assert job.wait(timeout=300) == 0, log.read_text()[-3000:]
    finally:
        job.kill()
    said = log.read_text()
    assert [status(island)["restarts"] for island in islands] == [0, 1]
    assert "island 1 was not in round" in said and "island 1 is back in round" in said and "joins them at step" in said
    ends = [open_checkpoint(str(island / "checkpoints" / f"step_{STEPS:08d}")) for island in islands]
    names = [name for name in ends[0].manifest.arrays if name.startswith("params.")]
    assert names and all(np.array_equal(ends[0].read(name), ends[1].read(name)) for name in names)
    assert (tmp_path / "run" / OUTER_SYNC_FOLDER / "place.json").is_file()


@pytest.mark.parametrize(
    ("count", "only", "flags", "message"),
    [
        (1, None, (), "--islands 1: expected 2 or more"),
        (2, 2, (), "--islands 2 --island 2: expected 2 or more, counted from 0"),
        (2, None, ("--comms.islands.index=1",), "is set by --islands for each island"),
    ],
)
def test_flags_that_make_no_sense_are_refused(tmp_path, count, only, flags, message):
    with pytest.raises(LaunchError, match=message):
        launch_islands("tiny", flags, tmp_path, count, only)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--island", "1"), "give their number"),
        (("--islands", "2", "--processes", "2"), "an island is one process"),
    ],
)
def test_the_command_refuses_them_too(capsys, flags, message):
    assert main(["launch", "quickstart", *flags]) == 6
    assert message in capsys.readouterr().err
