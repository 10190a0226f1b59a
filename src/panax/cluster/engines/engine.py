"""Interface of engines: each checks its availability, describes a submission, and places one agent on each
node."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from ...core.errors import LaunchError, suggest_name
from .resources import Resources

AGENT_COMMAND = (sys.executable, "-m", "panax.cluster.node.agent")
"""Command that an engine starts on each node; the supervisor's address and the job's secret are in its
environment."""

AGENTS_SECONDS = 25.0
"""Time for agents to connect if all of them are started at once."""

ENGINES = {"ray": "Ray", "slurm": "Slurm", "mpi": "Mpi", "kubernetes": "Kubernetes"}
"""The class of each engine, in the module of its name."""


@runtime_checkable
class RunningAgents(Protocol):
    """Agents that an engine has started."""

    def failure(self) -> str:
        """Return why an agent can't start or has gone, as reported by the engine; empty otherwise."""
        ...

    def log_tail(self) -> str:
        """Return the last lines of the engine's client and of agents, for the message if none connected."""
        ...

    def replace(self, node: int) -> None:
        """Start another agent in place of a node's agent that has gone.

        Raises:
            LaunchError: The engine can't start an agent.
        """
        ...

    def start_over(self, *, preempted: bool = False) -> int | None:
        """Make the engine start the whole job again, because it has too few nodes left.

        Args:
            preempted: The job ended in order, on request: start it again only if the engine has preempted its
                nodes for another job, and would not restart it itself.

        Returns:
            The exit code with which this launch has to end for the engine to do so; None if the engine can't.
        """
        ...

    def close(self) -> None:
        """End all agents and clients that were started; a second call has no effect."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Execution environment of a job.

    Attributes:
        agents_seconds: Time for agents to connect, once they are placed, in seconds.
    """

    agents_seconds: float

    def check(self) -> None:
        """Check that the engine can run the job, as far as that is possible without submitting it.

        Raises:
            LaunchError: The engine isn't installed, can't be reached, or has fewer resources than requested.
        """
        ...

    def render_submission(self, arguments: Sequence[str], folder: Path) -> str:
        """Return the submission as text: a script, a manifest, a command line.

        Args:
            arguments: `launch` and its arguments, for engines that run it again on their first node.
            folder: The run's folder.
        """
        ...

    def is_queued(self) -> bool:
        """Return True if a launch from here hands the job to a queue and ends: `submit`; otherwise it places
        agents now."""
        ...

    def submit(self, arguments: Sequence[str], folder: Path) -> str:
        """Submit the job to the engine's queue.

        Returns:
            The job's name in the queue.
        """
        ...

    def secret(self) -> str:
        """Return the secret shared by the job's processes; new unless the engine provides one."""
        ...

    def listen_address(self) -> tuple[str, int]:
        """Return the address and port (0 for any) at which the supervisor must listen so that agents can
        reach it."""
        ...

    def start_agents(self, supervisor: str, secret: str) -> RunningAgents:
        """Start an agent on each node.

        Args:
            supervisor: The supervisor's address, as `host:port`.
        """
        ...


def make_engine(
    name: str,
    resources: Resources,
    *,
    agent: Sequence[str] = AGENT_COMMAND,
    environment: Mapping[str, str] = os.environ,
) -> Engine:
    """Return an engine by name.

    Args:
        agent: The command that the engine starts on each node.
        environment: Environment variables of the launch.

    Raises:
        LaunchError: The name is unknown, or a field of `resources` has no effect on the engine.
    """
    if name not in ENGINES:
        raise LaunchError(f"unknown engine {name!r}; {suggest_name(name, ENGINES)}")
    # An engine is imported when chosen: its client may not be installed.
    module = importlib.import_module(f"{__package__}.{name}")
    engine = getattr(module, ENGINES[name])(resources, agent=agent, environment=environment)
    resources.check_used(name, module.USED_RESOURCES)
    return engine
