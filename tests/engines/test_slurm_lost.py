"""What is asked of Slurm when a node has gone from an allocation, with clients that are not real."""

import time
from pathlib import Path

import pytest

from panax.cluster.engines import Resources, make_engine
from panax.cluster.engines.slurm_agent import has_lost_script, requeue

GONE = "JobId=7 JobState=RUNNING BatchHost=a NodeList=b,c NumNodes=2"
SECRET = "5ecre7" * 8


@pytest.fixture
def clients(tmp_path):
    """Makes Slurm's programs, which write down how they are called."""

    def make(job: str = GONE, **scripts: str) -> dict[str, str]:
        usual = {
            "scontrol": f"case $2 in job|--oneliner) ;; hostnames) echo $3 | tr ',' '\\n'; exit ;; esac\n"
            f'case "$*" in *"show job"*) echo "{job}" ;; esac',
            "squeue": 'case "$*" in *%N*) echo b,c ;; *) echo PENDING ;; esac',
            "srun": "sleep 60",
            "sbatch": "env >> $0.env; echo 42",
            "scancel": ":",
        }
        for name, script in (usual | scripts).items():
            path = tmp_path / name
            path.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/told\n{script}\n')
            path.chmod(0o755)
        return {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf"}

    return make


def told(tmp_path: Path, name: str) -> list[str]:
    path = tmp_path / "told"
    return [line for line in path.read_text().splitlines() if line.startswith(f"{name} ")] if path.exists() else []


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (GONE, True),
        (GONE.replace("=b,c", "=a,c"), False),
        (GONE.replace("RUNNING", "COMPLETING"), False),
        (GONE.replace("BatchHost=a ", ""), False),
        ("slurm_load_jobs error: Unable to contact slurm controller", False),
    ],
)
def test_a_job_whose_batch_script_is_lost(job, expected, clients):
    assert has_lost_script(job, clients()) is expected


def test_an_agent_waits_until_slurm_knows(clients, tmp_path):
    environment = clients(GONE.replace("=b,c", "=a,b"))
    looks = []

    def later(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            clients()

    assert requeue("7", environment, later)
    assert len(looks) == 2 and told(tmp_path, "scontrol")[-1] == "scontrol requeue 7"


@pytest.fixture
def placed(clients):
    """Agents on the nodes a, b and c of a batch job."""

    def make(**more: str):
        environment = clients(scontrol="case $2 in hostnames) echo $3 | tr ',' '\\n' ;; esac", **more)
        variables = {"SLURM_JOB_NODELIST": "a,b,c", "PANAX_SLURM_FOLDER": "/runs/50% of it/job", "HOME": "/home/me"}
        resources = Resources(nodes=3, processes=6, memory="8G", partition="long", time="01:00:00")
        return make_engine("slurm", resources, environment=environment | variables).start_agents("10.0.0.1:1", SECRET)

    calls = []
    yield lambda **more: calls.append(make(**more)) or calls[-1]
    for each in calls:
        for one in (each._all, *each._later.values()):
            one.close(0.0)
        each.close()


def test_a_node_that_slurm_has_taken_out_is_asked_for_as_a_job(placed, tmp_path):
    here = placed()
    here.replace(1)
    deadline = time.monotonic() + 10
    while not any("--nodelist=b" in line for line in told(tmp_path, "srun")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not told(tmp_path, "sbatch") and all("--no-kill" in line for line in told(tmp_path, "srun"))
    here.replace(0)
    # Asked again while it waits in the queue.
    here.replace(0)
    (line,) = told(tmp_path, "sbatch")
    for word in (
        "--nodes=1",
        "--mem=8G",
        "--partition=long",
        "--time=01:00:00",
        "--cpus-per-task=2",
        "--no-requeue",
        "--exclude=b,c",
    ):
        assert f" {word} " in line
    assert "--output=/runs/50%% of it/job/slurm-%j.out" in line and "-m panax.cluster.node.agent" in line
    assert SECRET not in line and here.failure() == ""
    variables = (tmp_path / "sbatch.env").read_text()
    assert "PANAX_NODE=0" in variables and f"PANAX_SECRET={SECRET}" in variables
    # What Slurm has told this job would be taken for the other one's.
    assert "SLURM_JOB_ID" not in variables and "SLURM_CONF=/etc/slurm.conf" in variables
    for each in (here._all, *here._later.values()):
        each.close(0.0)
    here.close()
    assert told(tmp_path, "scancel") == ["scancel --quiet 42"]


def test_a_job_with_too_few_nodes_is_queued_again(placed, tmp_path):
    assert placed().start_over() == 75
    assert told(tmp_path, "scontrol")[-1] == "scontrol requeue 7"


@pytest.mark.parametrize(("when", "expected"), [("2026-11-23T15:03:01", 75), ("None", None)])
def test_a_preempted_job_that_has_saved_is_queued_again(when, expected, placed, tmp_path):
    """A job that ends in its time of grace counts as done for Slurm; one that a person ends is done."""
    here = placed()
    script = (tmp_path / "scontrol").read_text()
    (tmp_path / "scontrol").write_text(f"{script}\necho JobState=RUNNING PreemptTime={when} Reason=None")
    assert here.start_over(preempted=True) == expected
    assert ("scontrol requeue 7" in told(tmp_path, "scontrol")) is (expected is not None)


def test_slurm_that_does_not_answer_leaves_it_at_the_same_machine(placed, tmp_path):
    here = placed(squeue="exit 1")
    here.replace(0)
    assert not told(tmp_path, "sbatch")


def test_an_allocation_of_a_person_has_no_job_to_queue_again(clients):
    environment = clients() | {"SLURM_JOB_NODELIST": "a,b,c"}
    engine = make_engine("slurm", Resources(nodes=3, processes=3), environment=environment)
    here = engine.start_agents("10.0.0.1:1", SECRET)
    try:
        assert here.start_over() is None
    finally:
        here._all.close(0.0)
        here.close()
