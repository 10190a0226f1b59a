"""A run, or several side by side, as one page, from the files in their folders: no jax, no device, no network."""

from .until import Reached, until_loss
from .writing import report

__all__ = ["Reached", "report", "until_loss"]
