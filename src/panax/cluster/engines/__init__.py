"""Engines that place a job's agents: Ray, Slurm, MPI and Kubernetes, behind one interface."""

from .engine import AGENT_COMMAND, ENGINES, Engine, RunningAgents, make_engine
from .environment import node_number
from .resources import Resources, parse_time_limit

__all__ = [
    "AGENT_COMMAND", "ENGINES", "Engine", "Resources", "RunningAgents", "make_engine", "node_number",
    "parse_time_limit",
]  # fmt: skip
