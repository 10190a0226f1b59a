"""A real slurmctld with two slurmd on this machine: agents in an allocation, and what becomes of a job that is submitted."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_runs import command, environment, equals, losses, steps
from placing import AGENT, Supervised, ended, is_alive, until, with_token
from slurm_here import answer, cluster, job_is, submit

from panax.cluster.engines import Engine, Resources, make_engine
from panax.core.errors import LaunchError

pytestmark = pytest.mark.slow

ON_NODES = """
import os, signal, sys, time
print("attempt", os.environ.get("SLURM_RESTART_COUNT", "0"), "got", *sys.argv[1:], flush=True)
print("token", os.environ.get("HF_TOKEN"), "platforms", os.environ.get("JAX_PLATFORMS"), flush=True)
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(143)))
while "wait" in sys.argv:
    time.sleep(0.1)
sys.exit(7)
"""
"""Stands in for `python -m panax` in a batch script."""


@pytest.fixture(scope="module")
def conf(tmp_path_factory) -> Iterator[Path]:
    """The cluster's configuration; it is ended with the module's tests."""
    with cluster(2) as found:
        yield found


@pytest.fixture
def slurm(conf, monkeypatch):
    """Makes the engine, and the client's own commands see the cluster."""
    monkeypatch.setenv("SLURM_CONF", str(conf))

    def make(**asked) -> Engine:
        return make_engine("slurm", Resources(**asked), agent=AGENT, environment=with_token())

    return make


@pytest.fixture
def allocation(slurm, monkeypatch):
    """Makes the environment of an allocation of two nodes."""
    run = subprocess.run(
        ["salloc", "--no-shell", "-N2", "--ntasks-per-node=1"], capture_output=True, text=True, timeout=60
    )
    job = re.search(r"Granted job allocation (\d+)", run.stderr)
    assert job, run.stderr
    monkeypatch.setenv("SLURM_JOB_ID", job.group(1))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "panax[1-2]")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "1(x2)")
    monkeypatch.setenv("SLURMD_NODENAME", "panax1")
    yield job.group(1)
    subprocess.run(["scancel", job.group(1)], check=True, timeout=20)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"nodes": 3, "processes": 3}, "nodes=3, and the partition short has 2"),
        ({"partition": "shart"}, "Slurm has no partition 'shart'; did you mean 'short'"),
        ({"time": "01:30:00"}, "exceeds the limit of the partition short, which is 1:00:00"),
    ],
)
def test_what_the_cluster_does_not_have(slurm, asked, expected):
    with pytest.raises(LaunchError, match=expected):
        slurm(**asked).check()


def test_what_slurm_refuses_is_reported_in_its_words(slurm, tmp_path):
    engine = slurm(constraint="h100")
    engine.check()
    with pytest.raises(LaunchError, match=r"`sbatch --parsable .*` failed: .*feature"):
        engine.submit(["launch"], tmp_path)


def test_one_agent_a_node_and_another_for_one_that_is_lost(slurm, allocation):
    engine = slurm(nodes=2, processes=2)
    engine.check()
    assert not engine.is_queued() and engine.listen_address() == ("127.0.0.1", 0)
    with Supervised(engine) as supervised:
        first, second = supervised.come(2)
        assert (first.node, second.node) == ("0", "1") and (first.token, second.token) == ("-", "-")
        os.kill(second.pid, signal.SIGKILL)
        until(lambda: not is_alive(second.pid), "the killed agent ends")
        assert is_alive(first.pid) and supervised.placed.failure() == ""
        supervised.placed.replace(1)
        (again,) = supervised.come(1)
        assert again.node == "1" and is_alive(first.pid) and supervised.placed.failure() == ""
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: not is_alive(first.pid), "the other agent ends")
        supervised.placed.replace(0)
        (last,) = supervised.come(1)
        assert last.node == "0" and supervised.placed.failure() == ""
    ended(first, second, again, last)
    until(lambda: not answer("squeue", "--steps", "-h", "-j", allocation), "Slurm has no step of the job")


def test_an_allocation_that_ends_is_a_failure_that_reports_it(slurm, allocation):
    with Supervised(slurm(nodes=2, processes=2)) as supervised:
        agents = supervised.come(2)
        subprocess.run(["scancel", allocation], check=True)
        until(lambda: supervised.placed.failure(), "srun ends")
        assert supervised.placed.failure().startswith("srun ended") and "CANCELLED" in supervised.placed.failure()
    ended(*agents)


@pytest.fixture
def submitted(slurm, tmp_path, monkeypatch):
    """Submits a job with a stand-in for `panax`."""
    stand_in = tmp_path / "elsewhere/panax"
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").touch()
    (stand_in / "__main__.py").write_text(ON_NODES)
    monkeypatch.setenv("PYTHONPATH", str(stand_in.parent))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    folder = tmp_path / "50% of it"

    def submit(*arguments: str, **asked) -> tuple[str, Path]:
        engine = slurm(**asked)
        engine.check()
        return engine.submit(["launch", *arguments], folder), folder / "job"

    return submit


def test_the_exit_code_of_a_job_is_that_of_the_launch_and_it_gets_no_token(submitted):
    job, place = submitted("a b", nodes=2, processes=2, time="00:05:00")
    until(lambda: job_is(job, "FAILED"), "the job ends")
    assert "ExitCode=7:0" in answer("scontrol", "show", "job", job)
    assert (place / f"slurm-{job}.out").read_text() == "attempt 0 got launch a b\ntoken None platforms cpu\n"


def test_tasks_of_an_array_have_their_own_index_and_log(submitted):
    job, place = submitted("--name", "try-%a", array="0-1")
    until(lambda: all(job_is(f"{job}_{task}", "FAILED") for task in (0, 1)), "both end")
    for task in (0, 1):
        assert f"got launch --name try-{task}\n" in (place / f"slurm-{job}_{task}.out").read_text()


def test_a_job_is_asked_to_save_and_runs_again_when_it_is_queued_again(submitted):
    job, place = submitted("wait")
    log = place / f"slurm-{job}.out"
    until(lambda: log.exists() and "token" in log.read_text(), "the job runs")
    assert "Requeue=1" in answer("scontrol", "show", "job", job)
    # Requeued, as by a lost node or a preemption: it starts again with the same script, and its log goes on.
    answer("scontrol", "requeue", job)
    until(lambda: "attempt 1" in log.read_text(), "the job runs again", 180.0)
    assert "attempt 0" in log.read_text()
    # What Slurm sends before the time limit.
    answer("scancel", "--batch", "--signal=TERM", job)
    until(lambda: job_is(job, "FAILED"), "the job ends")
    assert "ExitCode=143:0" in answer("scontrol", "show", "job", job) and log.read_text().endswith("saved\n")


TWO = ("--on", "slurm", "--nodes", "2", "--processes", "2", "--devices", "1", "--time", "00:20:00")


def test_a_run_on_slurm_is_that_of_one_process(conf, slurm, alone, tmp_path):
    env = environment(tmp_path, SLURM_CONF=str(conf))
    job = submit(command("launch", "slurm", *steps(), *TWO), tmp_path, env)
    log = tmp_path / f"runs/slurm/job/slurm-{job}.out"
    until(lambda: job_is(job, "COMPLETED") or job_is(job, "FAILED"), "the job ends", 150.0)
    assert job_is(job, "COMPLETED"), log.read_text()
    equals(tmp_path / "runs/slurm", alone)


def test_a_run_saves_before_its_time_is_up_and_resumes_when_submitted_again(conf, slurm, tmp_path):
    env = environment(tmp_path, SLURM_CONF=str(conf))
    words = command("launch", "slurm", *steps(100_000), *TWO, "--checkpoint.every", "100_000")
    folder = tmp_path / "runs/slurm"
    job = submit(words, tmp_path, env)
    until(lambda: (folder / "metrics.jsonl").exists() and len(losses(folder)) > 3, "steps", 120.0)
    answer("scancel", "--batch", "--signal=TERM", job)
    until(lambda: job_is(job, "FAILED"), "the job ends", 60.0)
    assert "ExitCode=143:0" in answer("scontrol", "show", "job", job)
    saved = max(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))
    last = max(losses(folder))
    again = submit(words, tmp_path, env)
    until(lambda: max(losses(folder)) > max(saved, last), "it resumes", 120.0)
    assert f"{saved}" in (folder / f"job/slurm-{again}.out").read_text()
    # By hand, as a person would: all of it ends, and nothing is left.
    answer("scancel", again)
    until(lambda: job_is(again, "CANCELLED"), "the job ends", 60.0)
    until(lambda: not answer("squeue", "-h"), "Slurm has no job", 60.0)
