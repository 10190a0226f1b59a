"""Checks before a run: health and speed of every device, link, disk, clock and library."""

from .collectives import CollectiveUse, summarize_uses
from .findings import HardwareFinding, find_problems
from .measurements import measure
from .report import Preflight

__all__ = ["CollectiveUse", "HardwareFinding", "Preflight", "find_problems", "measure", "summarize_uses"]
