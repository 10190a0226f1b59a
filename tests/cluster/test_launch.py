"""`panax launch` with processes that train: losses as of one process, and the run's folder as on one machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from panax.cluster.supervisor.job_folder import read_incidents

TESTS = Path(__file__).parents[1]
RECIPE = str(TESTS / "tiny_recipe.py")
STEPS = ("--num-steps", "8", "--checkpoint.every", "4", "--log-every", "1", "--evaluate.every", "8")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def panax(*arguments: str, devices: int = 4, seconds: float = 400) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PANAX_PROC", "XLA_"))}
    environment = kept | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-m", "panax", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    found = panax("train", RECIPE, "--directory", str(folder), "--mesh.fsdp", "4", *STEPS)
    assert found.returncode == 0, found.stderr
    return losses(folder)


def test_four_processes_train_as_one_does(alone, tmp_path):
    finished = panax(
        "launch", RECIPE, "--processes", "4", "--devices", "1", "--directory", str(tmp_path), "--mesh.fsdp", "4", *STEPS
    )
    assert finished.returncode == 0, finished.stderr
    together = losses(tmp_path)
    assert len(together) == 8 and together == pytest.approx(alone, rel=1e-5)
    status = json.loads((tmp_path / "job/status.json").read_text())
    assert [one["step"] for one in status["processes"]] == [8] * 4 and status["end"]["exit_code"] == 0
    assert "4 processes; first step after" in finished.stderr and "held-out loss" in finished.stderr
    assert not read_incidents(tmp_path / "job")
    again = panax(
        "launch", RECIPE, "--processes", "2", "--devices", "2", "--directory", str(tmp_path), "--mesh.fsdp", "4", *STEPS
    )
    assert again.returncode == 0 and "all 8 steps are done" in again.stderr, again.stderr


def test_a_recipe_that_one_host_does_not_have_is_not_tried_again(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "import os, tiny_recipe\n"
        "if os.environ.get('PANAX_PROCESS') == '1':\n    import absent_here\n"
        "from panax import Experiment\n"
        "def mine() -> Experiment:\n    return tiny_recipe.tiny()\n"
    )
    finished = panax(
        "launch", str(recipe), "--processes", "2", "--devices", "1", "--directory", str(tmp_path / "run"), seconds=60
    )
    assert finished.returncode == 2 and "process 1 on" in finished.stderr and "absent_here" in finished.stderr
    assert len(finished.stderr.splitlines()) < 12, finished.stderr


def test_what_listens_while_a_job_runs(tmp_path):
    """The supervisor and its agent: nothing. JAX's coordinator: loopback. Gloo: the address of the host's own name."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    command = [
        sys.executable,
        "-m",
        "panax",
        "launch",
        RECIPE,
        "--processes",
        "2",
        "--devices",
        "1",
        "--num-steps",
        "2000",
    ]
    command += ["--directory", str(tmp_path), "--mesh.fsdp", "2", "--evaluate.every", "0", "--checkpoint.every", "1000"]
    supervisor = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        status = tmp_path / "job/status.json"
        deadline = time.monotonic() + 200
        while not (status.is_file() and json.loads(status.read_text())["step"] >= 1):
            assert supervisor.poll() is None and time.monotonic() < deadline
            time.sleep(0.5)
        workers = {one["pid"] for one in json.loads(status.read_text())["processes"]}
        family = [psutil.Process(supervisor.pid), *psutil.Process(supervisor.pid).children(recursive=True)]
        # Beside the supervisor, its agent and the workers there are workers that wait for a restart.
        waiting = {each.pid for each in family if "panax.cli.standby" in each.cmdline()}
        assert workers < {each.pid for each in family} - waiting and len(family) - len(waiting) == 4
        listening = {
            each.pid: {
                c.laddr.ip.removeprefix("::ffff:")
                for c in each.net_connections("inet")
                if c.status == psutil.CONN_LISTEN
            }
            for each in family
        }
    finally:
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(120) == 143
    own_addresses = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None)}
    for pid, addresses in listening.items():
        assert (addresses <= {"127.0.0.1", *own_addresses}) if pid in workers else not addresses, listening
    assert any("127.0.0.1" in addresses for addresses in listening.values()), "JAX's coordinator"


def test_a_worker_that_never_comes_is_named(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text(
        "import os, time, tiny_recipe\n"
        "from panax import Experiment\n"
        "if os.environ.get('PANAX_PROCESS') == '1':\n    time.sleep(600)\n"
        "def mine() -> Experiment:\n    return tiny_recipe.tiny()\n"
    )
    began = time.monotonic()
    where = ("--processes", "2", "--devices", "1", "--directory", str(tmp_path / "run"))
    finished = panax("launch", str(recipe), *where, seconds=100)
    assert (
        finished.returncode == 5
        and "only 1 of 2 processes reached" in finished.stderr
        and "missing: 1" in finished.stderr
    ), finished.stderr
    assert time.monotonic() - began < 60
    assert read_status(tmp_path / "run")["end"]["cause"] == "processes did not join"


def read_status(folder: Path) -> dict:
    return json.loads((folder / "job/status.json").read_text())


FOUND = """\
from panax.preflight import HardwareFinding
from panax.run.tools import check
import tiny_recipe

check.find_problems = lambda profile: [HardwareFinding("clock", "host b", "its clock is 3 s ahead", "have NTP set it")]

def odd() -> "panax.Experiment":
    return tiny_recipe.tiny()
"""


@pytest.mark.parametrize("strict", [True, False])
def test_a_job_is_checked_before_its_first_step(tmp_path, strict):
    recipe, run = tmp_path / "odd.py", tmp_path / "run"
    recipe.write_text("import panax\n" + FOUND)
    flag = "--check" if strict else "--check=warn"
    finished = panax(
        "launch",
        str(recipe),
        flag,
        "--processes",
        "2",
        "--devices",
        "1",
        "--directory",
        str(run),
        "--mesh.fsdp",
        "2",
        *STEPS,
    )
    said = finished.stderr
    assert (run / "hardware.json").exists(), said
    assert said.count("its clock is 3 s ahead") == 1, said
    if not strict:
        assert finished.returncode == 0 and len(losses(run)) == 8, said
        return
    assert finished.returncode == 6 and not (run / "metrics.jsonl").exists(), said
    assert "remove its host" in said and "user error" not in said and "correct it as the message describes" not in said
    assert "launch: trains again" not in said and "Traceback" not in said
    end = json.loads((run / "job/status.json").read_text())["end"]
    assert end["cause"] == "hardware check" and "its clock is 3 s ahead" in end["message"]
    quiet = panax(
        "launch", str(recipe), flag, "--quiet", "--processes", "1", "--devices", "2", "--directory", str(run), "--mesh.fsdp",
        "2", *STEPS,
    )  # fmt: skip
    assert quiet.returncode == 6 and quiet.stderr.count("its clock is 3 s ahead") == 1, quiet.stderr
