"""The process that connects to Ray for a supervisor, run by `python -m panax.cluster.engines.ray_client`.

It receives requests as JSON lines on its standard input and answers with JSON lines on its standard output;
at the end of its input it ends its actors. Ray's connections are those of the cluster that it joins.
"""

import contextlib
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import IO, Any

from ...core.errors import LaunchError
from ...core.install_hints import package_install_command
from ...system import json_reader
from .client import last_lines
from .environment import NODE

INSTALL_ADVICE = f"install it on every machine with `{package_install_command('ray')}`"

START_ADVICE = (
    "start a cluster with `ray start --head` here and `ray start --address=HOST:6379` on others, "
    "then launch on one of them"
)

PLACE_SECONDS = 20.0
"""Time for Ray to grant a placement group; if others use the cluster, the job has to be launched later."""

END_SECONDS = 3.0
"""Time for agents to end by themselves, as they do when the supervisor has disconnected them."""

PATIENCE_SECONDS, AGAIN_SECONDS = 20.0, 1.0
"""Time for Ray to move a lost node's bundle, and between two starts of its agent until then."""

LOOK_SECONDS = 0.2


def connect_ray() -> Any:
    """Return the module `ray`, connected to the cluster that includes this machine.

    Raises:
        LaunchError: Ray is not installed, or no cluster that includes this machine was found.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise LaunchError(f"Ray is not installed here ({error}); {INSTALL_ADVICE}") from error
    address = os.environ.get("RAY_ADDRESS", "auto")
    if "://" in address:
        raise LaunchError(f"RAY_ADDRESS={address!r} is for Ray's remote client; expected HOST:PORT: {START_ADVICE}")
    if address not in ("auto", "local"):
        _reach(address)
    try:
        ray.init(address="auto" if address == "local" else address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LaunchError(f"no Ray cluster was found ({last_lines(str(error), 2)}); {START_ADVICE}") from error
    return ray


def check(ray: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Check that the cluster, if it is otherwise unused, has room for a job; return this machine's address in
    the cluster."""
    bundle = request["bundle"]
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fitting = [
        resources for resources in alive if all(resources.get(name, 0) >= amount for name, amount in bundle.items())
    ]
    if len(fitting) < request["nodes"]:
        have = "; ".join(", ".join(f"{resources.get(name, 0):g} {name}" for name in bundle) for resources in alive)
        raise LaunchError(
            f"the job needs {_nodes(request)} with {_format_amounts(bundle)} each; {len(fitting)} of the "
            f"{len(alive)} nodes of the "
            f"Ray cluster have as much ({have}). Ask for less with nodes, processes or cpus, or add machines with "
            f"`ray start --address`"
        )
    return {"here": ray.util.get_node_ip_address()}


class AgentActors:
    """Placement group of a job and its actors."""

    def __init__(self, ray: Any, request: dict[str, Any]):
        self._ray, self._bundle = ray, request["bundle"]
        self._agent, self._environment, self._folder = request["agent"], request["environment"], request["folder"]
        self._actors: dict[int, Any] = {}
        self._ends: dict[Any, int] = {}
        self._again: dict[int, float] = {}
        self._patience: dict[int, float] = {}
        self._group = ray.util.placement_group([self._bundle] * request["nodes"], strategy=request["strategy"])
        if not self._group.wait(PLACE_SECONDS):
            ray.util.remove_placement_group(self._group)
            free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU", "TPU")}
            raise LaunchError(
                f"Ray did not grant {_nodes(request)} with {_format_amounts(self._bundle)} each in "
                f"{PLACE_SECONDS:.0f} s; free in "
                f"the whole cluster: {_format_amounts(free)}. Launch again when other jobs have ended, or ask for less"
            )
        for node in range(request["nodes"]):
            self.start(node)

    def start(self, node: int) -> None:
        """Start a node's agent, in place of the previous one if there is one."""
        if node in self._actors:
            self._ends = {end: failed_node for end, failed_node in self._ends.items() if failed_node != node}
            self._ray.kill(self._actors[node], no_restart=True)
        strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        others = {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")}
        actor = self._ray.remote(AgentActor).options(
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0),
            resources=others or None,
            max_restarts=0,
            scheduling_strategy=strategy(self._group, placement_group_bundle_index=node),
        )
        self._actors[node] = actor.remote()
        # A method's arguments go to the actor alone: the cluster stores those of its creation.
        environment = {**self._environment, NODE: str(node)}
        self._ends[self._actors[node].run.remote(self._agent, environment, self._folder)] = node

    def failed(self) -> list[tuple[int, str]]:
        """Return the nodes with agents that have failed since the last call, and why.

        Ray may notice later than the supervisor that a node is gone: a replacement is then started on the
        lost node, and started again until Ray has moved the bundle.
        """
        now = time.monotonic()
        for node in [node for node, due in self._again.items() if now >= due]:
            del self._again[node]
            self.start(node)
        if not self._ends:
            return []
        ready, _ = self._ray.wait(list(self._ends), num_returns=len(self._ends), timeout=0)
        failures = [(node, why) for end in ready for node in [self._ends.pop(end)] if (why := self._describe_end(end))]
        late = {node for node, _ in failures if now < self._patience.get(node, 0.0)}
        self._again |= dict.fromkeys(late, now + AGAIN_SECONDS)
        return [(node, why) for node, why in failures if node not in late]

    def replace(self, node: int) -> None:
        """Start an agent in place of a lost agent."""
        self._patience[node] = time.monotonic() + PATIENCE_SECONDS
        self._again.pop(node, None)
        self.start(node)

    def close(self) -> None:
        """End all agents."""
        with contextlib.suppress(Exception):  # a cluster that has gone has nothing left to end
            if self._ends:
                self._ray.wait(list(self._ends), num_returns=len(self._ends), timeout=END_SECONDS)
            for actor in self._actors.values():
                self._ray.kill(actor, no_restart=True)
            self._ray.util.remove_placement_group(self._group)

    def _describe_end(self, end: Any) -> str:
        """Return how an agent failed; empty if it ended as requested."""
        try:
            code, said = self._ray.get(end)
        except importlib.import_module("ray.exceptions").RayError as error:
            return f"Ray has lost the node or its actor: {str(error).strip().splitlines()[0]}"
        return f"the agent ended with exit code {code}: {said or 'no output'}" if code else ""


class AgentActor:
    """Actor on a node, in one of Ray's processes: it runs the agent as a child process that ends with the
    actor."""

    def run(self, command: list[str], environment: dict[str, str], folder: str) -> tuple[int, str]:
        """Run the agent in the folder in which the job was launched; return its exit code and last lines."""
        if not os.path.isdir(folder):
            return 1, f"{folder} is not a folder on {socket.gethostname()}; launch in one that all nodes see"
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.tether", *command],
            # Variables that Ray has set for this node stay, including its devices.
            env={**os.environ, **environment},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        lines: deque[bytes] = deque(maxlen=20)
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        code = process.wait()
        reader.join(1.0)
        return code, last_lines(b"".join(lines).decode(errors="replace"), 4)


def serve(read_line: Callable[[float], str | None], answer: Callable[..., None]) -> None:
    """Serve requests until the input ends.

    Args:
        read_line: Returns the next line within a number of seconds: None if there is none, empty at the end
            of the input.
        answer: Writes an answer.
    """
    ray: Any = None
    agents: AgentActors | None = None
    try:
        while (line := read_line(LOOK_SECONDS)) != "":
            if line is not None:
                request = json_reader.parse(line)
                try:
                    ray = ray or connect_ray()
                    if request["do"] == "check":
                        answer(**check(ray, request))
                    elif request["do"] == "place":
                        agents = AgentActors(ray, request)
                        answer(placed=True)
                    elif agents is not None:
                        agents.replace(request["node"])
                        answer(replaced=request["node"])
                except LaunchError as error:
                    answer(error=str(error))
            if agents is not None:
                for node, why in agents.failed():
                    answer(failed=node, why=f"node {node}: {why}")
    finally:
        if agents is not None:
            agents.close()
        if ray is not None:
            ray.shutdown()


def main() -> None:
    # Ray's output goes to its standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lines, ended = deque[str](), False
    partial = b""

    def read_line(seconds: float) -> str | None:
        nonlocal partial, ended
        if not lines and not ended and select.select([0], [], [], seconds)[0]:
            data = os.read(0, 1 << 20)
            ended = not data
            *complete_lines, partial = (partial + data).split(b"\n")
            lines.extend(line.decode() for line in complete_lines)
        return lines.popleft() if lines else "" if ended else None

    def answer(**content: Any) -> None:
        # The supervisor may have gone; the next request read shows it.
        with contextlib.suppress(BrokenPipeError):
            answers.write(json.dumps(content) + "\n")
            answers.flush()

    serve(read_line, answer)


def _read(stream: IO[bytes], lines: deque[bytes]) -> None:
    for line in stream:
        lines.append(line[-1000:])


def _format_amounts(amounts: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in amounts.items()) or "nothing"


def _nodes(asked: dict[str, Any]) -> str:
    return "one node" if asked["nodes"] == 1 else f"{asked['nodes']} nodes"


def _reach(address: str) -> None:
    """Check that a server listens at the cluster's address: Ray itself waits for a long time."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise LaunchError(f"RAY_ADDRESS={address!r}; expected HOST:PORT of the cluster's head, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError as error:
        raise LaunchError(f"no answer at RAY_ADDRESS={address!r} ({error}); {START_ADVICE}") from error


if __name__ == "__main__":
    main()
