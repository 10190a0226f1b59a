"""Ray: a placement group with one bundle per node, and in each an actor that runs the node's agent.

Ray's client is a separate process (`ray_client.py`), so that a supervisor neither carries its threads and
memory nor shows its output.
"""

import json
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ...core.errors import LaunchError
from ...system import json_reader
from ...system.children import end_process
from ...system.json_reader import JsonError
from .client import local_address, read_tail
from .engine import AGENT_COMMAND, AGENTS_SECONDS
from .environment import NODE, SECRET, SUPERVISOR, forwarded_variables
from .resources import Resources

USED_RESOURCES = frozenset({"cpus"})

CLIENT_SECONDS = 60.0
"""Time for Ray's client to be imported, to connect and to place: it has shorter limits for each."""

END_SECONDS = 20.0
"""Time for the client to end its actors."""

RAY_RESOURCES = {"gpu": "GPU", "tpu": "TPU"}


class Ray:
    """Agents in actors of a cluster that includes this machine."""

    agents_seconds = AGENTS_SECONDS

    def __init__(
        self, resources: Resources, *, agent: Sequence[str] = AGENT_COMMAND, environment: Mapping[str, str] = os.environ
    ):
        self._resources, self._agent, self._environment = resources, tuple(agent), dict(environment)
        self._passed = forwarded_variables(environment, resources.env)
        self._local_address = ""

    def check(self) -> None:
        client = RayClient(self._environment)
        try:
            self._local_address = client.ask({"do": "check", **self._request})["here"]
        finally:
            client.close()

    def render_submission(self, arguments: Sequence[str], folder: Path) -> str:
        amounts = ", ".join(f"{name}: {amount:g}" for name, amount in self._request["bundle"].items())
        names = ", ".join([*self._passed, SUPERVISOR, SECRET, NODE])
        return (
            f"placement group  {self._resources.nodes} bundles of {{{amounts}}}, {self._request['strategy']}\n"
            f"in each          an actor that runs {' '.join(self._agent)}\n"
            f"environment      {names}\n"
        )

    def is_queued(self) -> bool:
        return False

    def submit(self, arguments: Sequence[str], folder: Path) -> str:
        raise LaunchError(
            "Ray has no queue; launch on a node of the cluster, or by `ray job submit -- panax launch ...`"
        )

    def secret(self) -> str:
        return secrets.token_hex(32)

    def listen_address(self) -> tuple[str, int]:
        if self._resources.address:
            return self._resources.address, 0
        if not self._local_address:
            self.check()
        # A cluster that was started on loopback has one machine, whatever its nodes are.
        return self._local_address or local_address(), 0

    def start_agents(self, supervisor: str, secret: str) -> "RayAgents":
        client = RayClient(self._environment)
        environment = {**self._passed, SUPERVISOR: supervisor, SECRET: secret}
        try:
            client.ask(
                {
                    "do": "place",
                    **self._request,
                    "agent": self._agent,
                    "environment": environment,
                    "folder": os.getcwd(),
                }
            )
        except LaunchError:
            client.close()
            raise
        return RayAgents(client, self._resources.nodes)

    @property
    def _request(self) -> dict[str, Any]:
        bundle = {"CPU": float(self._resources.cpus_per_node)}
        if amount := self._resources.accelerators_per_node:
            bundle[RAY_RESOURCES[self._resources.accelerator]] = float(amount)
        strategy = "STRICT_SPREAD" if self._resources.nodes > 1 else "STRICT_PACK"
        return {"nodes": self._resources.nodes, "bundle": bundle, "strategy": strategy}


class RayAgents:
    """Agents in actors. Ray moves the bundle of a lost node to another one with room, and a new actor follows
    on request."""

    def __init__(self, client: "RayClient", nodes: int):
        self._client, self._nodes = client, nodes
        self._failed: dict[int, str] = {}

    def failure(self) -> str:
        for event in self._client.events():
            if "failed" in event:
                self._failed[event["failed"]] = event["why"]
        if ended := self._client.ended():
            return ended
        return "\n".join(why for _, why in sorted(self._failed.items()))

    def log_tail(self) -> str:
        return self._client.log_tail()

    def replace(self, node: int) -> None:
        if not 0 <= node < self._nodes:
            raise LaunchError(f"the job has nodes 0 to {self._nodes - 1}; there is no node {node}")
        self._client.ask({"do": "replace", "node": node})
        # Events of this node before the answer concern the lost agent: Ray may notice its end late.
        self.failure()
        self._failed.pop(node, None)

    def start_over(self, *, preempted: bool = False) -> int | None:
        return None

    def close(self) -> None:
        self._client.close()


class RayClient:
    """The process that connects to Ray: JSON lines to its standard input and from its standard output."""

    def __init__(self, environment: Mapping[str, str]):
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.ray_client"],
            env={"RAY_USAGE_STATS_ENABLED": "0", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            LaunchError: The client reported an error, or has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._answers.get(timeout=CLIENT_SECONDS)
        except (OSError, queue.Empty):
            answer = None
        if answer is None:
            raise LaunchError(
                self.ended() or f"Ray's client gave no answer in {CLIENT_SECONDS:.0f} s: {self.log_tail()}"
            )
        if "error" in answer:
            raise LaunchError(answer["error"])
        return answer

    def events(self) -> list[dict[str, Any]]:
        """Return the client's events since the last call."""
        events = []
        while not self._events.empty():
            events.append(self._events.get())
        return events

    def ended(self) -> str:
        """Return how the client has ended; empty while it runs."""
        if self._output.closed or self._process.poll() is None:
            return ""
        return f"Ray's client ended with exit code {self._process.returncode}: {self.log_tail() or 'no output'}"

    def log_tail(self) -> str:
        """Return the last lines of the client's output."""
        return read_tail(self._output)

    def close(self) -> None:
        """Make the client end its actors, and itself."""
        if self._output.closed:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        end_process(self._process, END_SECONDS)
        self._reader.join(END_SECONDS)  # children of the client may hold its pipe
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._output.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                found = json_reader.parse_as(dict, line)
            except JsonError:
                continue  # a library's output
            (self._events if "failed" in found else self._answers).put(found)
        self._answers.put(None)
