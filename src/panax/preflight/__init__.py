"""Before a run: is every device, link, disk, clock and library as it should be, and what can they do?"""

from .collectives import Use, uses_of
from .judging import Finding, findings_of
from .measuring import measure
from .report import Preflight

__all__ = ["Finding", "Preflight", "Use", "findings_of", "measure", "uses_of"]
