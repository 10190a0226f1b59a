"""A run that is killed again and again ends with the bits of one that never was, between rollout and update too."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from launching import environment
from letters import write_files

from panax.checkpoint import open_checkpoint
from panax.rollouts.journal import JOURNAL_FILE, JournalEntry

STEPS, KILLS = 60, 20


def start(files, folder, asynchronous):
    script = Path(__file__).parent / "killed_run.py"
    variables = environment(1, script.parent) | {"JAX_COMPILATION_CACHE_DIR": str(files / "cache")}
    command = [sys.executable, str(script), str(files), str(folder), str(STEPS), str(asynchronous)]
    with open(files / "log", "ab") as log:
        return subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)


def finish(files, folder, asynchronous):
    process = start(files, folder, asynchronous)
    try:
        assert process.wait(timeout=120) == 0, (files / "log").read_text()[-3000:]
    finally:
        process.kill()


def count_lines(folder):
    journal = folder / JOURNAL_FILE
    return journal.read_text().count("\n") if journal.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_is_killed_at_random_moments_has_the_bits_of_an_undisturbed_one(tmp_path, asynchronous):
    write_files(tmp_path)
    finish(tmp_path, tmp_path / "one", asynchronous)
    draw, killed, moments = random.Random(0), tmp_path / "two", set()
    for _ in range(KILLS):
        before, process = count_lines(killed), start(tmp_path, killed, asynchronous)
        # From the first rollout of this start on: the time before is the same each time.
        until = time.monotonic() + 60
        while count_lines(killed) <= before and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.4))
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        steps = [int(path.name.removeprefix("step_")) for path in (killed / "checkpoints").glob("step_*")]
        moments.add(2 * count_lines(killed) - max(steps, default=0))
    finish(tmp_path, killed, asynchronous)
    # Killed while a rollout was in the journal that no checkpoint had used, and after one had.
    assert len(moments) > 1
    ends = [open_checkpoint(str(folder / "checkpoints" / f"step_{STEPS:08d}")) for folder in (tmp_path / "one", killed)]
    assert ends[0].manifest.arrays.keys() == ends[1].manifest.arrays.keys()
    for name in ends[0].manifest.arrays:
        np.testing.assert_array_equal(ends[0].read(name), ends[1].read(name), err_msg=name)
    entries = [JournalEntry.from_json(line) for line in (killed / JOURNAL_FILE).read_text().splitlines()]
    usual = [JournalEntry.from_json(line) for line in (tmp_path / "one" / JOURNAL_FILE).read_text().splitlines()]
    # Each rollout is there once, since its rewards were not asked for twice.
    assert [(entry.number, entry.digests, entry.rewards) for entry in entries] == [
        (entry.number, entry.digests, entry.rewards) for entry in usual
    ]
