"""Nodes of a job as its supervisor meets them: those that do not come, differ, are silent, or are lost."""

import contextlib
import socket
import threading
import time

import psutil
import pytest
from test_supervisor import gone

import panax.cluster.node.agent
import panax.cluster.supervisor.nodes
from panax.cluster.launcher import launch
from panax.cluster.node.channel import Channel, connect_to_supervisor
from panax.cluster.supervisor.nodes import Node, Nodes
from panax.cluster.supervisor.roster import check_alike
from panax.cluster.supervisor.supervisor import STATUS_SECONDS
from panax.cluster.supervisor.view import View
from panax.core.errors import LaunchError


class Elsewhere:
    """An engine with nodes that come as a test wants; each is a thread that speaks as an agent does."""

    agents_seconds = 1.0

    def __init__(self, *facts, known: str = "secret"):
        self.facts, self.known, self.channels = facts, known, []

    def check(self): ...

    def render_submission(self, arguments, folder):
        return ""

    def is_queued(self):
        return False

    def submit(self, arguments, folder):
        return ""

    def secret(self):
        return "secret"

    def listen_address(self):
        return "127.0.0.1", 0

    def start_agents(self, supervisor, secret):
        def come(facts):
            with contextlib.suppress(OSError):
                self.channels.append(channel := connect_to_supervisor(supervisor, self.known, 5.0))
                channel.send(hello=facts)

        self.threads = [threading.Thread(target=come, args=(facts,)) for facts in self.facts]
        for thread in self.threads:
            thread.start()
        return self

    def failure(self):
        return ""

    def log_tail(self):
        return "the engine's own last line"

    def replace(self, node): ...

    def start_over(self, *, preempted=False):
        return None

    def close(self):
        for thread in self.threads:
            thread.join()
        for channel in self.channels:
            channel.close()


def node(host, **versions):
    return {
        "host": host,
        "cpus": 8,
        "address": "127.0.0.1",
        "versions": {"python": "3.11.7", "jax": "0.10.2", **versions},
    }


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            Elsewhere(node("a")),
            r"1 of 2 nodes connected within 1 s \(missing: node 1\)(.|\n)*the engine's own last line",
        ),
        (Elsewhere(node("a"), node("b"), known="wrong"), "2 connections without the job's secret were refused"),
        (
            Elsewhere(node("a"), node("b", jax="0.11.0")),
            "the hosts have different versions of jax: 0.10.2 on a; 0.11.0 on b; install the same on all",
        ),
        (Elsewhere(node("a"), node("b") | {"cpus": 0}), "1 processes on b, which has 0 processors"),
    ],
    ids=["one never comes", "secret", "versions", "processors"],
)
def test_nodes_that_do_not_come_or_are_not_alike(launched, engine, message):
    job = launched.job("well", processes=2, nodes=2, policy={"agents_seconds": 1.0})
    with pytest.raises(LaunchError, match=message):
        launch(job, engine, name="elsewhere", view=View(8, quiet=True))
    assert launched.status["end"]["exit_code"] == 6


def test_silent_or_malformed_connections_delay_nobody(launched):
    """Strangers at the supervisor's port, more than it greets at one time, while the job's own nodes come."""

    class Besieged(Elsewhere):
        def start_agents(self, supervisor, secret):
            host, _, port = supervisor.rpartition(":")
            self.strangers = [socket.create_connection((host, int(port))) for _ in range(12)]
            for stranger in self.strangers[:6]:
                with contextlib.suppress(OSError):
                    stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * 9)
            return super().start_agents(supervisor, secret)

    engine = Besieged(node("a"))
    job = launched.job("well", processes=2, nodes=2, policy={"agents_seconds": 3.0})
    began = time.monotonic()
    with pytest.raises(LaunchError, match="of 2 nodes connected within 3 s"):
        launch(job, engine, name="elsewhere", view=View(8, quiet=True))
    assert time.monotonic() - began < 10
    for stranger in engine.strangers:
        stranger.close()


def test_each_process_of_a_node_takes_as_many_gpus(launched):
    job, (mine, theirs) = launched.job("well", processes=3), socket.socketpair()
    with mine, theirs:
        machine = Node(Channel(mine))
        machine.facts = node("a") | {"gpus": 4}
        with pytest.raises(
            LaunchError,
            match="3 processes on a, which has 4 GPUs for them: each takes the same number; start 1, 2, 4 on",
        ):
            check_alike([machine], job)
        machine.facts["gpus"] = 6
        check_alike([machine], job)


def test_an_agent_that_prints_nothing_is_a_lost_host(launched, monkeypatch):
    monkeypatch.setattr(panax.cluster.supervisor.nodes, "SILENT_SECONDS", 3.0)
    stopped = []

    def hold() -> None:
        while not (launched.folder / "job/status.json").exists() or launched.status["step"] < 1:
            time.sleep(0.05)
        [agent] = [each for each in psutil.Process().children() if "panax.cluster.node.agent" in each.cmdline()]
        stopped.append(agent.pid)
        agent.suspend()
        while not launched.incidents or launched.status["attempt"] < 2:
            time.sleep(0.05)
        (launched.folder / "job/stop").touch()

    thread = threading.Thread(target=hold)
    thread.start()
    assert launched.run("waits", policy={"stall_seconds": 60.0}) == 143
    thread.join()
    assert launched.incidents[0]["cause"] == "lost host"
    assert gone([*stopped, *launched.pids()])


def test_of_two_agents_of_one_node_the_later_one_counts():
    pairs = [socket.socketpair() for _ in range(3)]
    nodes = Nodes("secret", 1)
    channels = []
    for mine, theirs in pairs:
        nodes.take(Channel(mine))
        channels.append(Channel(theirs))
    for number, channel in zip(("0", "0", "1"), channels, strict=True):
        channel.send(hello=node("a") | {"node": number, "pid": len(nodes.here)})
        for _ in nodes.messages(0.1):
            raise AssertionError("nothing but greetings was sent")
    assert nodes.complete and list(nodes.here) == [0] and nodes.departed == [(0, "a")] and not nodes.lost
    for channel in (channels[0], channels[2]):
        channel.receive()
        assert channel.closed
    channels[1].receive()
    assert not channels[1].closed
    nodes.close()
    for channel in channels:
        channel.close()


def test_a_host_that_is_cut_off_ends_its_workers_before_the_job_continues_without_it():
    # Each side may have heard the other a ping before the link broke.
    agent = panax.cluster.node.agent
    latest = agent.SILENT_SECONDS + agent.TICK_SECONDS
    assert latest + agent.PING_SECONDS + STATUS_SECONDS < panax.cluster.supervisor.nodes.SILENT_SECONDS
