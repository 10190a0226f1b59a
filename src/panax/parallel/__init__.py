"""How the work of a model is spread over time and devices."""

from .remat import RematPolicy, rematerialise

__all__ = ["RematPolicy", "rematerialise"]
