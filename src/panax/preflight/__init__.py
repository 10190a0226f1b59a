"""Before a run: is every device, link, disk, clock and library as it should be, and what can they do?"""

from .collectives import CollectiveUse, uses_of
from .judging import HardwareFinding, findings_of
from .measuring import measure
from .report import Preflight

__all__ = ["CollectiveUse", "HardwareFinding", "Preflight", "findings_of", "measure", "uses_of"]
