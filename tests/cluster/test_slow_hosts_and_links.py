"""Processes that train while a host or a link is made slow: it is named, with the right axis, and nothing else is."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import one_job_at_a_time

from panax.cluster.supervisor.job_folder import read_findings, read_incidents

HERE = Path(__file__).parent
FLAGS = ("--devices", "1", "--checkpoint.every", "50", "--evaluate.every", "0", "--log-every", "10", "--no-spares")
SQUARE = ("--mesh.replica", "2", "--mesh.fsdp", "2")
ENDLESS = ("--num-steps", "100000")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Job:
    """A launched job, and the records in its folder."""

    def __init__(self, folder: Path, command: list[str]):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PANAX_PROC", "XLA_"))}
        paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._said = folder / "run", folder / "said"
        with open(self._said, "w") as said:
            self.child = subprocess.Popen(
                [sys.executable, *command, "--directory", str(self.folder), *FLAGS],
                env=environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                text=True,
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    @property
    def found(self) -> list[dict]:
        return read_findings(self.folder / "job")

    @property
    def status(self) -> dict:
        path = self.folder / "job/status.json"
        return json.loads(path.read_text()) if path.exists() else {"step": -1}

    def tell(self, line: str) -> None:
        self.child.stdin.write(f"{line}\n")
        self.child.stdin.flush()

    def until(self, what: Callable[[], bool], seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert self.child.poll() is None and time.monotonic() < end, self.said[-3000:]
            time.sleep(0.2)

    def later(self, seconds: float) -> dict:
        """The status some seconds from now."""
        time.sleep(seconds)
        return self.status


@contextlib.contextmanager
def launched(folder: Path, *arguments: str, hosts: int = 0) -> Iterator[Job]:
    """A job on this machine, or in namespaces that stand for hosts; it is ended at last."""
    command = ["-m", "panax", "launch"] if not hosts else [str(HERE / "namespaces.py"), str(folder), str(hosts)]
    with one_job_at_a_time():
        job = Job(folder, [*command, *arguments])
        try:
            yield job
        finally:
            if job.child.poll() is None:
                job.child.send_signal(signal.SIGINT)
                time.sleep(2)
                job.child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.child.wait(30)
            job.child.kill()
            job.child.stdin.close()


HOLD = """
import os, signal, sys, time
# Before all usual programs, so that a busy machine does not let the process run for longer.
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
while True:
    os.kill(int(sys.argv[1]), signal.SIGSTOP)
    time.sleep(0.012)
    os.kill(int(sys.argv[1]), signal.SIGCONT)
    time.sleep(0.004)
"""


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """A process that is stopped for three quarters of the time, as one on a slow or shared core. It takes root."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(pid)])
    try:
        yield
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def test_a_host_that_is_slowed_is_named_and_well_again(tmp_path):
    nodes = ("--nodes", "4", "--processes", "4", *SQUARE)
    with launched(tmp_path, str(HERE / "steady_recipe.py"), *nodes, *ENDLESS, "--probe.every", "10") as job:
        job.until(lambda: job.status["step"] >= 40)
        with held(job.status["processes"][2]["pid"]):
            job.until(lambda: any(one["kind"] == "slow host" for one in job.found))
        job.until(lambda: any(one["kind"] == "host well again" for one in job.found))
        first = job.found[0]
    assert (first["kind"], first["unit"]) == ("slow host", 2) and "its matrix multiplications take" in first["message"]
    assert not [one for one in job.found if "link" in one["kind"]]


def test_a_link_that_is_slowed_is_named_within_20_steps_with_its_axis_and_ends(tmp_path):
    recipe = str(HERE.parent / "tiny_recipe.py")
    with launched(tmp_path, recipe, *SQUARE, *ENDLESS, "--probe.every", "10", hosts=4) as job:
        job.until(lambda: job.status["step"] >= 40)
        job.tell("limit_to 2 3 20")
        # The step at which that was is at most this one.
        slowed = job.later(4.0)["step"]
        job.until(lambda: any(one["kind"] == "slow link" for one in job.found))
        job.tell("free 2")
        job.until(lambda: any(one["kind"] == "link well again" for one in job.found))
        slow, well, *_ = [one for one in job.found if "link" in one["kind"]]
    assert slow["step"] <= slowed + 20
    assert slow["message"].startswith("mesh axis fsdp is slow between host2, host3: an all-gather over it carries ")
    assert slow["message"].endswith("It is the link between host2 (process 2) and host3 (process 3)")
    assert "at the run's first probes" in slow["message"] and "mesh axis fsdp" in well["message"]


def test_a_host_that_sends_slowly_is_named_by_the_axes_that_share_it(tmp_path):
    recipe = str(HERE.parent / "tiny_recipe.py")
    with launched(tmp_path, recipe, *SQUARE, *ENDLESS, "--probe.every", "10", hosts=4) as job:
        job.until(lambda: job.status["step"] >= 40)
        job.tell("limit 1 20")
        job.until(lambda: sum(one["kind"] == "slow link" for one in job.found) == 2)
        slow = [one for one in job.found if one["kind"] == "slow link"]
    assert {one["message"].partition(" is slow between")[0] for one in slow} == {"mesh axis fsdp", "mesh axis replica"}
    assert all("It is host1 (process 1)" in one["message"] for one in slow)


def test_a_host_that_is_slowed_is_taken_out_by_policy(tmp_path):
    flags = ("--nodes", "4", "--processes", "4", *SQUARE, *ENDLESS, "--probe.every", "10", "--stragglers", "cordon")
    with launched(tmp_path, str(HERE / "steady_recipe.py"), *flags, "--min-nodes", "3") as job:
        job.until(lambda: job.status["step"] >= 40)
        with held(job.status["processes"][1]["pid"]):
            job.until(lambda: any(one["kind"] == "slow host" for one in job.found))
            assert job.found[0]["unit"] == 1
        job.until(lambda: job.status["nodes"]["running"] == [0, 2, 3] and job.status["state"] == "running")
    # The end of this test is another one.
    first, *_ = read_incidents(job.folder / "job")
    assert first["cause"] == "new layout" and first["message"] == "node 1 was taken out of the job"


def test_a_host_whose_own_work_takes_long_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PANAX_TEST_SLOW_HOOK", "3")
    flags = ("--nodes", "4", "--processes", "4", *SQUARE, *ENDLESS, "--probe.every", "10")
    with launched(tmp_path, str(HERE / "steady_recipe.py"), *flags) as job:
        job.until(lambda: any(one["kind"] == "slow host" for one in job.found))
        first = job.found[0]
    assert (
        first["unit"] == 3
        and "of each step of" in first["message"]
        and "on hooks, where others spend" in first["message"]
    )


@pytest.mark.parametrize("number", range(5))
def test_a_healthy_run_names_nothing(tmp_path, number):
    nodes = ("--nodes", "4", "--processes", "4", *SQUARE)
    with launched(tmp_path, str(HERE / "steady_recipe.py"), *nodes, "--num-steps", "60", "--probe.every", "10") as job:
        assert job.child.wait(400) == 0, job.said[-3000:]
    assert job.status["processes"][0]["probe"]["number"] >= 5
    assert job.found == [], job.found
    waits = [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("seconds/probe") for line in waits)


@pytest.mark.parametrize("seconds", ["20", "300"])
def test_a_process_that_is_stopped_is_reported_with_the_collective_that_waits_for_it(tmp_path, seconds):
    """By the supervisor, or before it by JAX, which ends the other processes after 90 seconds."""
    flags = ("--nodes", "4", "--processes", "4", *SQUARE, *ENDLESS, "--stall-seconds", seconds, "--max-restarts", "0")
    with launched(tmp_path, str(HERE.parent / "tiny_recipe.py"), *flags) as job:
        job.until(lambda: job.status["step"] >= 20)
        os.kill(job.status["processes"][2]["pid"], signal.SIGSTOP)
        assert job.child.wait(200) == 6, job.said[-3000:]
    end = job.status["end"]
    assert end["cause"] == "hang" and end["process"] == 2
    assert (
        "process 2 on" in end["message"]
        and "processes 0, 1, 3 wait for it in an all-gather or reduce-scatter over fsdp" in (end["message"])
    )
