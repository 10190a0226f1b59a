"""A real Ray cluster of three nodes on this machine: agents in actors, a node that is lost, an actor that is killed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_runs import command, environment, equals, losses, run, steps
from placing import AGENT, Supervised, ended, is_alive, until, with_token

from panax.cluster.engines import Engine, Resources, make_engine
from panax.cluster.supervisor.job_folder import read_incidents
from panax.core.errors import LaunchError

pytestmark = pytest.mark.slow


class Cluster:
    """The process that holds the cluster."""

    def __init__(self) -> None:
        script = str(Path(__file__).with_name("ray_cluster.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, "2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    assert importlib.util.find_spec("ray"), "the test needs Ray: tests/engines/install.sh ray"
    found = Cluster()
    yield found
    found.close()


@pytest.fixture
def ray(cluster):
    def make(**asked) -> Engine:
        return make_engine(
            "ray", Resources(**asked), agent=AGENT, environment={**with_token(), "RAY_ADDRESS": cluster.address}
        )

    return make


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            {"nodes": 4, "processes": 4},
            r"needs 4 nodes with 1 CPU each; 3 of the 3 nodes of the Ray cluster have as much",
        ),
        ({"processes": 3}, r"needs one node with 3 CPU each; 0 of the 3 nodes .* \(2 CPU; 2 CPU; 2 CPU\)"),
        ({"accelerator": "gpu"}, r"with 1 CPU, 1 GPU each; 0 of the 3 nodes"),
    ],
)
def test_what_the_cluster_does_not_have(ray, asked, expected):
    with pytest.raises(LaunchError, match=expected):
        ray(**asked).check()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:9", "no answer at RAY_ADDRESS='127.0.0.1:9'.*; start a cluster with `ray start --head`"),
        ("ray://127.0.0.1:10001", "is for Ray's remote client; expected HOST:PORT"),
        ("here", "RAY_ADDRESS='here'; expected HOST:PORT"),
    ],
)
def test_no_cluster_is_there(address, expected):
    with pytest.raises(LaunchError, match=expected):
        make_engine("ray", Resources(), environment={**os.environ, "RAY_ADDRESS": address}).check()


def test_a_lost_node_is_reported_and_replaced_when_there_is_another(ray, cluster):
    engine = ray(nodes=3, processes=3)
    engine.check()
    assert engine.listen_address() == ("127.0.0.2", 0)
    with Supervised(engine) as supervised:
        agents = supervised.come(3)
        assert [agent.node for agent in agents] == ["0", "1", "2"] and {agent.token for agent in agents} == {"-"}
        assert supervised.placed.failure() == ""
        cluster.tell("lose")
        until(supervised.placed.failure, "the lost node is told", 30.0)
        status = supervised.placed.failure()
        assert status.startswith("node ") and "Ray has lost the node or its actor" in status and status.count("\n") == 0
        lost = int(status.removeprefix("node ").partition(":")[0])
        # Its agent has gone with it, though nobody told it to; the others go on.
        ended(agents[lost])
        assert all(is_alive(agent.pid) for agent in agents if agent != agents[lost])
        cluster.tell("gain")
        supervised.placed.replace(lost)
        assert supervised.placed.failure() == ""
        (again,) = supervised.come(1, 60.0)
        assert again.node == str(lost) and supervised.placed.failure() == ""
    ended(*agents, again)


def test_an_agent_that_fails_is_reported_with_its_last_lines(ray):
    engine = ray()
    engine._agent = ("sh", "-c", "echo no module named panax >&2; exit 3")
    with Supervised(engine) as supervised:
        until(supervised.placed.failure, "the failure is told")
        assert supervised.placed.failure() == "node 0: the agent ended with exit code 3: no module named panax"


def test_a_folder_that_a_node_does_not_have_is_reported(ray, monkeypatch):
    monkeypatch.setattr(os, "getcwd", lambda: "/no/such/folder")
    with Supervised(ray()) as supervised:
        until(supervised.placed.failure, "the failure is told")
        assert "/no/such/folder is not a folder on " in supervised.placed.failure()


def test_agents_end_with_a_client_that_is_killed(ray):
    """Kill -9 of the supervisor ends its client's input; kill -9 of the client itself is worse."""
    with Supervised(ray(nodes=2, processes=2)) as supervised:
        agents = supervised.come(2)
        client = supervised.placed._client
        os.kill(client._process.pid, signal.SIGKILL)
        ended(*agents)
        assert "Ray's client ended with exit code -9" in supervised.placed.failure()


def test_a_cluster_that_is_busy_states_what_is_free(ray):
    with Supervised(ray(nodes=3, processes=6)) as supervised:
        supervised.come(3)
        with pytest.raises(
            LaunchError, match="Ray did not grant one node with 1 CPU each in 20 s; free in the whole cluster"
        ):
            ray().place("127.0.0.2:1", "s")


def test_the_supervisors_process_does_not_hold_ray(ray):
    ray().check()
    assert "ray" not in sys.modules


def test_a_run_on_ray_is_that_of_one_process(cluster, alone, tmp_path):
    env = environment(tmp_path, RAY_ADDRESS=cluster.address)
    flags = ("--on", "ray", "--nodes", "2", "--processes", "2", "--devices", "1")
    run(command("launch", "ray", *steps(), *flags), tmp_path, env)
    equals(tmp_path / "runs/ray", alone)


def test_a_run_continues_elsewhere_when_a_node_is_lost(cluster, tmp_path):
    env = environment(tmp_path, RAY_ADDRESS=cluster.address)
    flags = ("--on", "ray", "--nodes", "2", "--processes", "2", "--devices", "1", "--checkpoint.every", "10")
    folder = tmp_path / "runs/ray"
    # Both nodes that are left take part.
    cluster.tell("lose")
    with open(tmp_path / "said", "w") as said:
        words = command("launch", "ray", *steps(1500), *flags)
        launch = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=said, stderr=said)
    try:
        until(lambda: (folder / "metrics.jsonl").exists() and max(losses(folder), default=0) >= 30, "steps", 120.0)
        cluster.tell("gain")
        cluster.tell("lose")
        before = max(losses(folder))
        cluster.tell("gain")
        assert launch.wait(200) == 0, (tmp_path / "said").read_text()
    finally:
        launch.kill()
        launch.wait()
    text = (tmp_path / "said").read_text()
    assert max(losses(folder)) == 1500 > before and "launch: done" in text
    assert "lost host after step" in text and json.loads((folder / "job/status.json").read_text())["restarts"] == 1


def test_a_run_continues_with_two_nodes_of_three_and_readmits_the_third(cluster, tmp_path):
    env = environment(tmp_path, RAY_ADDRESS=cluster.address)
    flags = ("--nodes", "3", "--processes", "3", "--devices", "1", "--checkpoint.every", "10", "--mesh.fsdp", "1")
    folder = tmp_path / "runs/ray"

    def nodes() -> int:
        status = json.loads((folder / "job/status.json").read_text())
        return len(status["nodes"]["running"]) if status["state"] == "running" else 0

    with open(tmp_path / "said", "w") as said:
        words = command(
            "launch", "ray", *steps(100_000), "--on", "ray", *flags, "--mesh.replica", "3", "--step.pad-rows"
        )
        launch = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=said, stderr=said)
    try:
        until(lambda: (folder / "job/layouts.json").exists() and nodes() == 3, "all three train", 120.0)
        cluster.tell("lose")
        until(lambda: nodes() == 2, "two go on", 60.0)
        cluster.tell("gain")
        until(lambda: nodes() == 3, "all three train again", 120.0)
        run([sys.executable, "-m", "panax", "stop", str(folder)], tmp_path, env)
        assert launch.wait(60) == 143, (tmp_path / "said").read_text()
    finally:
        launch.kill()
        launch.wait()
    causes = [one["cause"] for one in read_incidents(folder / "job")]
    assert causes == ["lost host", "new layout"], (tmp_path / "said").read_text()
    logged_steps = sorted(losses(folder))
    assert logged_steps == list(range(1, len(logged_steps) + 1)), "no step is missing"
