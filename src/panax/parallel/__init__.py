"""How the work of a model is spread over time and devices."""

from .layers import scan_layers
from .remat import RematPolicy, rematerialise

__all__ = ["RematPolicy", "rematerialise", "scan_layers"]
