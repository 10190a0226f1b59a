"""A real Slurm of three nodes: a run that loses one, the supervisor's too, and one that is preempted."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from engine_runs import command, environment, losses, steps
from placing import is_alive, until
from slurm_here import answer, cluster, fact, job_is, submit, tell

from panax.cluster.supervisor.job_folder import read_incidents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

THREE = ("--on", "slurm", "--nodes", "3", "--processes", "3", "--devices", "1", "--time", "00:30:00", "--no-spares")
LAYOUT = ("--mesh.replica", "3", "--mesh.fsdp", "1", "--step.pad-rows")


@pytest.fixture(scope="module")
def conf() -> Iterator[Path]:
    with cluster(3) as found:
        yield found


@pytest.fixture
def launched(conf, monkeypatch, tmp_path):
    """Submits a run on all three nodes; its job and its folder."""
    monkeypatch.setenv("SLURM_CONF", str(conf))
    env = environment(tmp_path, SLURM_CONF=str(conf))

    def make(number: int, every: int) -> tuple[str, Path]:
        often = ("--checkpoint.every", str(every), "--evaluate.every", "0")
        return submit(command("launch", "nodes", *steps(number), *THREE, *LAYOUT, *often), tmp_path, env), folder

    folder = tmp_path / "runs/nodes"
    yield make
    subprocess.run(["scancel", "--user", "root"], check=True, timeout=20)
    until(lambda: not answer("squeue", "-h"), "Slurm has no job", 60.0)
    for node in answer("sinfo", "-h", "-N", "-p", "short", "-t", "down", "-o", "%N").split():
        tell(conf, "up", node)


def status(folder: Path) -> dict:
    try:
        return json.loads((folder / "job/status.json").read_text())
    except (OSError, ValueError):
        return {"state": "", "step": -1, "nodes": {"running": []}, "processes": []}


def trains(folder: Path, nodes: int, seconds: float = 400.0) -> None:
    """Wait until it trains on so many nodes."""

    def on_them() -> bool:
        found = status(folder)
        return found["state"] == "running" and found["step"] >= 0 and len(found["nodes"]["running"]) == nodes

    until(on_them, f"it trains on {nodes} nodes", seconds)


def taken(folder: Path) -> int:
    return max(losses(folder), default=0) if (folder / "metrics.jsonl").exists() else 0


def committed(folder: Path) -> int:
    found = [int(path.parent.name.removeprefix("step_")) for path in folder.glob("checkpoints/step_*/manifest.json")]
    return max(found, default=0)


def agent_of(folder: Path, process: int) -> psutil.Process:
    """The agent above a worker."""
    (worker,) = [one for one in status(folder)["processes"] if one["process"] == process]
    return psutil.Process(worker["pid"]).parent()


def test_a_drained_node_whose_agent_is_lost_and_one_that_goes_down_come_back(conf, launched):
    job, folder = launched(1500, 20)
    trains(folder, 3)
    # Slurm gives a node that is drained to no other job; this one may still use it.
    answer("scontrol", "update", "nodename=panax2", "state=drain", "reason=test")
    os.kill(agent_of(folder, 1).pid, signal.SIGKILL)
    until(lambda: len(read_incidents(folder / "job")) >= 1 and status(folder)["state"] != "running", "the loss is seen")
    trains(folder, 3)
    answer("scontrol", "update", "nodename=panax2", "state=resume")

    before = committed(folder)
    lost = "panax3" if fact(job, "BatchHost") != "panax3" else "panax2"
    tell(conf, "down", lost)
    trains(folder, 2)
    assert job_is(job, "RUNNING") and fact(job, "NumNodes") == "2"
    tell(conf, "up", lost)
    trains(folder, 3)
    other = [line for line in answer("squeue", "-h", "-o", "%i %j").splitlines() if not line.startswith(job + " ")]
    assert len(other) == 1 and other[0].endswith("panax-nodes-node"), "an agent in a job of its own"
    until(lambda: not job_is(job, "RUNNING"), "the job ends", 900.0)
    log = (folder / f"job/slurm-{job}.out").read_text()
    assert job_is(job, "COMPLETED") and "launch: done" in log, log
    causes = [one["cause"] for one in read_incidents(folder / "job")]
    assert causes[0] == "lost host" and causes[-2:] == ["lost host", "new layout"], causes
    assert sorted(losses(folder)) == list(range(1, 1501)), "no step is missing"
    resumed = [int(step) for step in re.findall(r"resuming from step (\d+)", log)]
    assert max(resumed) > before
    until(lambda: not answer("squeue", "-h"), "the other node's job ends too", 60.0)


def test_the_supervisors_host_is_lost_and_slurm_starts_the_job_again(conf, launched):
    job, folder = launched(300, 20)
    trains(folder, 3)
    until(lambda: committed(folder) > 0, "a checkpoint", 200.0)
    workers = [one["pid"] for one in status(folder)["processes"]]
    agents = [psutil.Process(pid).ppid() for pid in workers]
    host, before = fact(job, "BatchHost"), committed(folder)
    tell(conf, "down", host)
    until(lambda: not any(is_alive(pid) for pid in workers), "no worker is left", 30.0)
    until(lambda: fact(job, "Restarts") == "1", "an agent has had it queued again", 100.0)
    until(lambda: not any(is_alive(pid) for pid in agents), "no agent is left", 30.0)
    tell(conf, "up", host)
    # Slurm lets a job that was queued again wait for two minutes.
    until(lambda: job_is(job, "RUNNING"), "it runs again", 300.0)
    until(lambda: not job_is(job, "RUNNING"), "the job ends", 900.0)
    log = (folder / f"job/slurm-{job}.out").read_text()
    assert job_is(job, "COMPLETED"), log
    assert int(re.findall(r"resuming from step (\d+)", log)[-1]) >= before
    assert sorted(losses(folder)) == list(range(1, 301))


def test_a_preempted_run_saves_at_one_step_and_resumes_from_it(conf, launched):
    job, folder = launched(300, 100_000)
    trains(folder, 3)
    until(lambda: taken(folder) > 10, "steps", 200.0)
    assert committed(folder) == 0
    urgent = answer(
        "sbatch", "--parsable", "-p", "urgent", "-N3", "--exclusive", "--output=/dev/null", "--wrap=sleep 3"
    )
    until(lambda: committed(folder) > 0, "all processes save", 20.0)
    saved = committed(folder)
    until(lambda: job_is(urgent, "COMPLETED"), "the urgent job has had the nodes", 60.0)
    assert fact(job, "Restarts") == "1" and taken(folder) == saved
    until(lambda: job_is(job, "RUNNING"), "it runs again", 300.0)
    until(lambda: not job_is(job, "RUNNING"), "the job ends", 900.0)
    log = (folder / f"job/slurm-{job}.out").read_text()
    assert job_is(job, "COMPLETED"), log
    assert re.findall(r"resuming from step (\d+)", log) == [str(saved)]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 301)), "each step is taken once"
