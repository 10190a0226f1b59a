"""A stand-in for a supervisor: it listens, has an engine place stand-ins for agents, and keeps their connections."""

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from panax.cluster.engines import Engine

AGENT = (sys.executable, str(Path(__file__).with_name("stand_in.py")))


class Came(NamedTuple):
    """An agent that has connected."""

    node: str
    pid: int
    token: str


class Supervised:
    """Agents that an engine has placed."""

    def __init__(self, engine: Engine):
        host, port = engine.listen_address()
        self.secret = engine.secret()
        self._listener = socket.create_server((host, port))
        self._listener.settimeout(0.1)
        self.placed = engine.start_agents(f"{host}:{self._listener.getsockname()[1]}", self.secret)
        self.connections: list[socket.socket] = []

    def come(self, count: int, seconds: float = 25.0) -> list[Came]:
        """The next agents that connect, in the order of their nodes."""
        positions = []
        deadline = time.monotonic() + seconds
        while len(positions) < count:
            assert time.monotonic() < deadline, (
                f"{len(positions)} of {count} agents came: {self.placed.failure()} {self.placed.log_tail()}"
            )
            try:
                connection = self._listener.accept()[0]
            except TimeoutError:
                continue
            connection.settimeout(10)
            self.connections.append(connection)
            secret, node, pid, token = connection.makefile().readline().split()
            assert secret == self.secret
            positions.append(Came(node, int(pid), token))
        return sorted(positions)

    def __enter__(self) -> "Supervised":
        return self

    def __exit__(self, *error: object) -> None:
        for connection in self.connections:
            connection.close()
        self._listener.close()
        self.placed.close()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def ended(*agents: Came) -> None:
    """See that no process of these agents is left."""
    for agent in agents:
        until(lambda pid=agent.pid: not is_alive(pid), f"process {agent.pid} ends")


def with_token() -> dict[str, str]:
    """The environment of a launch that holds a token, which no node gets unless it is named."""
    return {**os.environ, "HF_TOKEN": "secret-of-mine"}
