"""A job of three processes stops if one is signaled; after a crash it continues from the memory of its hosts."""

import json
import re
import signal
import time
from pathlib import Path

import campaign
import pytest

from panax.checkpoint import Checkpointer

PROCESSES = 3


def wait_for(path: Path, job) -> None:
    deadline = time.monotonic() + campaign.SECONDS
    while not path.exists():
        assert all(child.poll() is None for child in job.children), job.shown()
        assert time.monotonic() < deadline, job.shown()
        time.sleep(0.01)


@pytest.mark.slow
def test_sigterm_to_one_process_saves_the_same_step_in_all(tmp_path):
    job = campaign.start(tmp_path, PROCESSES, every=4)
    try:
        wait_for(tmp_path / "run" / "checkpoints" / "step_00000004" / "manifest.json", job)
        job.children[2].send_signal(signal.SIGTERM)
        assert job.wait(campaign.SECONDS) == [0] * PROCESSES, job.shown()
    finally:
        job.kill()
    ends = [json.loads(job.said(i).splitlines()[-1]) for i in range(PROCESSES)]
    assert len({end["step"] for end in ends}) == 1 and {end["by"] for end in ends} == {"SIGTERM"}
    assert 4 <= ends[0]["step"] < campaign.STEPS
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints")
    assert checkpointer.latest() == ends[0]["step"]
    assert checkpointer.open(ends[0]["step"]).verify() == []


@pytest.mark.slow
def test_a_crash_between_checkpoints_continues_from_memory(tmp_path):
    """No checkpoint is due before the end; the copies in memory are all there is, and one host's are lost."""
    expected = campaign.undisturbed(tmp_path / "undisturbed", PROCESSES)
    folder = tmp_path / "crashed"
    job = campaign.start(folder, PROCESSES, every=1000, memory=3)
    try:
        # The copy of step 9 is begun when those of step 6 are complete.
        for host in range(PROCESSES):
            while not list(folder.glob(f"host-{host}/*/*/step_00000009")):
                assert all(child.poll() is None for child in job.children), job.shown()
                time.sleep(0.01)
        job.children[1].kill()
    finally:
        job.kill()
    for path in sorted((folder / "host-1").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert Checkpointer(folder / "run" / "checkpoints").steps() == []
    end = campaign.finish(folder, PROCESSES, every=1000, memory=3)
    said = (folder / "job" / "0.out").read_text()
    match = re.search(r"resuming from step (\d+) of \d+: memory of hosts", said)
    assert match and int(match[1]) >= 6, said
    assert end == expected
