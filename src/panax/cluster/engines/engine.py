"""What every engine does: it says whether it is there, what it would be given, and places one agent on each node."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from ...core.errors import LaunchError, suggest_name
from .resources import Resources

AGENT_COMMAND = (sys.executable, "-m", "panax.cluster.node.agent")
"""What an engine starts on each node; the supervisor's address and the job's secret are in its environment."""

AGENTS_SECONDS = 25.0
"""For agents to come where all of them are started at once."""

ENGINES = {"ray": "Ray", "slurm": "Slurm", "mpi": "Mpi", "kubernetes": "Kubernetes"}
"""The class of each engine, in the module of its name."""


@runtime_checkable
class RunningAgents(Protocol):
    """Agents that an engine has started."""

    def failure(self) -> str:
        """Why an agent can't come or has gone, as the engine tells it; empty while all is well."""
        ...

    def log_tail(self) -> str:
        """The last lines of the engine's client and of agents, for a message that says why none came."""
        ...

    def replace(self, node: int) -> None:
        """Start another agent in the place of a node's, which has gone.

        Raises:
            LaunchError: The engine can't.
        """
        ...

    def start_over(self, *, preempted: bool = False) -> int | None:
        """Have the engine start the whole job again, which has too few nodes left.

        Args:
            preempted: It has ended well since it was told to: start it again only where the engine has taken its nodes away
                for another one, and would forget it.

        Returns:
            The exit code with which this launch has to end for that; None where the engine can't.
        """
        ...

    def close(self) -> None:
        """End everything that was started; calling it twice is harmless."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Where a job runs.

    Attributes:
        agents_seconds: For agents to come, once they are placed.
    """

    agents_seconds: float

    def check(self) -> None:
        """See that the engine can take the job, as far as it tells without being given it.

        Raises:
            LaunchError: It isn't installed, can't be reached, or has less than what is asked for.
        """
        ...

    def render_submission(self, arguments: Sequence[str], folder: Path) -> str:
        """What the engine would be given, as text: a script, a manifest, a command line.

        Args:
            arguments: `launch` and what follows it on the command line, for engines that run it again on their first node.
            folder: The run's.
        """
        ...

    def is_queued(self) -> bool:
        """Whether a launch from here hands the job to a queue and ends: `submit`; otherwise it places agents now."""
        ...

    def submit(self, arguments: Sequence[str], folder: Path) -> str:
        """Hand the job to the engine's queue.

        Returns:
            The job's name there.
        """
        ...

    def secret(self) -> str:
        """What the job's processes know of each other; new unless the engine has brought one."""
        ...

    def listen_address(self) -> tuple[str, int]:
        """Where the supervisor must listen so that agents reach it: an address, and a port, where 0 is any."""
        ...

    def start_agents(self, supervisor: str, secret: str) -> RunningAgents:
        """Start an agent on each node.

        Args:
            supervisor: Where it listens, as `host:port`.
        """
        ...


def make_engine(
    name: str,
    resources: Resources,
    *,
    agent: Sequence[str] = AGENT_COMMAND,
    environment: Mapping[str, str] = os.environ,
) -> Engine:
    """The engine of a name.

    Args:
        agent: The command that it starts on each node.
        environment: What it is started from.

    Raises:
        LaunchError: There is not one of this name, or a field of `resources` has no effect there.
    """
    if name not in ENGINES:
        raise LaunchError(f"there is no engine {name!r}; {suggest_name(name, ENGINES)}")
    # An engine is imported when chosen: its client may not be installed.
    module = importlib.import_module(f"{__package__}.{name}")
    engine = getattr(module, ENGINES[name])(resources, agent=agent, environment=environment)
    resources.check_used(name, module.USED)
    return engine
