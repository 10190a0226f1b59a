"""How the work of a model is spread over time and devices."""

from .context_choice import ContextAttention
from .layers import scan_layers
from .remat import RematPolicy, rematerialize
from .schedules import Pipeline

__all__ = ["ContextAttention", "Pipeline", "RematPolicy", "rematerialize", "scan_layers"]
