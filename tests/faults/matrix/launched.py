"""A supervisor with nodes in separate network namespaces: `python launched.py JSON`, with the fields of `Asked`.

A node that is lost does not come back here, as on a broken machine.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from panax.cluster.engines import AGENT_COMMAND
from panax.cluster.engines.environment import NODE, SECRET, SUPERVISOR
from panax.cluster.job import STANDBY_COMMAND, Job, RestartPolicy
from panax.cluster.launcher import launch
from panax.cluster.supervisor import nodes as agents
from panax.core.errors import LaunchError


@dataclasses.dataclass(frozen=True)
class Asked:
    """Result of a launch.

    Attributes:
        prefixes: What runs a command on each host.
        address: Where hosts find the supervisor.
        silent_seconds: Without a word from a host until it counts as lost.
    """

    arguments: list[str]
    folder: str
    num_steps: int
    prefixes: list[list[str]]
    address: str
    silent_seconds: float
    spares: bool
    policy: dict[str, float]


class Placed:
    """An agent on each host."""

    def __init__(self, asked: Asked, supervisor: str, secret: str):
        self._agents = [
            subprocess.Popen(
                [*prefix, *AGENT_COMMAND],
                env={**os.environ, SUPERVISOR: supervisor, SECRET: secret, NODE: str(node)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            for node, prefix in enumerate(asked.prefixes)
        ]

    def failure(self) -> str:
        return ""

    def start_over(self, *, preempted: bool = False) -> int | None:
        return None

    def log_tail(self) -> str:
        return ""

    def replace(self, node: int) -> None:
        raise LaunchError(f"host{node} is broken")

    def close(self) -> None:
        for agent in self._agents:
            try:
                agent.wait(1.0)
            except subprocess.TimeoutExpired:
                # One that is cut off has not heard that the job is over.
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()


@dataclasses.dataclass
class Namespaces:
    """Hosts in namespaces as an engine."""

    asked: Asked
    agents_seconds: float = 25.0

    def check(self) -> None:
        pass

    def render_submission(self, arguments: Sequence[str], folder: Path) -> str:
        return ""

    def is_queued(self) -> bool:
        return False

    def submit(self, arguments: Sequence[str], folder: Path) -> str:
        raise NotImplementedError

    def secret(self) -> str:
        return os.urandom(32).hex()

    def listen_address(self) -> tuple[str, int]:
        return self.asked.address, 0

    def start_agents(self, supervisor: str, secret: str) -> Placed:
        return Placed(self.asked, supervisor, secret)


def main() -> int:
    request = Asked(**json.loads(sys.argv[1]))
    agents.SILENT_SECONDS = request.silent_seconds
    count = len(request.prefixes)
    job = Job(
        arguments=tuple(request.arguments),
        folder=Path(request.folder),
        name="matrix",
        num_steps=request.num_steps,
        processes=count,
        nodes=count,
        devices=1,
        spare=STANDBY_COMMAND if request.spares else (),
        policy=RestartPolicy(**request.policy),
    )
    try:
        return launch(job, Namespaces(request), name="namespaces")
    except LaunchError as error:
        print(f"panax: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
