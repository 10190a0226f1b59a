"""Engines that place a job's agents: Ray, Slurm, MPI and Kubernetes, behind one interface."""

from .engine import AGENT, ENGINES, Engine, Placed, engine_of
from .environment import node_number
from .resources import Resources, seconds_of

__all__ = ["AGENT", "ENGINES", "Engine", "Placed", "Resources", "engine_of", "node_number", "seconds_of"]
