"""Parallelism of a model over time and devices: pipelines, context parallelism, expert exchange, and
rematerialization."""

from .context_choice import ContextAttention
from .layers import scan_layers
from .remat import RematPolicy, rematerialize
from .schedules import Pipeline

__all__ = ["ContextAttention", "Pipeline", "RematPolicy", "rematerialize", "scan_layers"]
