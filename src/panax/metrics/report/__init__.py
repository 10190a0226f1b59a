"""Report on one run, or several side by side, as one page, from the files in their folders: no jax, no
device, no network."""

from .until import LossTarget, time_to_loss
from .writer import report

__all__ = ["LossTarget", "report", "time_to_loss"]
