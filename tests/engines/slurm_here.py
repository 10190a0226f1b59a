"""A real Slurm on this machine, for tests: its cluster, its records of jobs, and jobs that are submitted to it."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from engine_runs import run

CLUSTER = Path(__file__).with_name("slurm.sh")


@contextlib.contextmanager
def cluster(nodes: int) -> Iterator[Path]:
    """The configuration of a cluster that is there while it is entered."""
    assert shutil.which("slurmctld"), "the test needs Slurm: tests/engines/install.sh slurm"
    # Slurm's daemons need a short path, which others may enter.
    folder = Path(f"/tmp/panax-slurm-{os.getpid()}-{nodes}")
    started = subprocess.run([CLUSTER, "start", folder, str(nodes)], capture_output=True, text=True, timeout=60)
    assert started.returncode == 0, started.stdout + started.stderr
    try:
        yield folder / "slurm.conf"
    finally:
        subprocess.run([CLUSTER, "stop", folder], check=True, timeout=60)
        assert not folder.exists()


def tell(conf: Path, what: str, node: str) -> None:
    """Have a node go `down`, or come `up`: `panax3`."""
    number = node.removeprefix("panax")
    done = subprocess.run([CLUSTER, what, conf.parent, number], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def answer(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def fact(job: str, name: str) -> str:
    """Of a job, as Slurm reports it."""
    found = re.search(rf"\b{name}=(\S*)", answer("scontrol", "show", "job", job))
    assert found, name
    return found.group(1)


def job_is(job: str, state: str) -> bool:
    return fact(job, "JobState") == state


def submit(words: list[str], folder: Path, env: dict[str, str]) -> str:
    """The number of the job."""
    said = run(words, folder, env)
    job = re.search(r"submitted to slurm as (\d+)", said)
    assert job, said
    return job.group(1)
