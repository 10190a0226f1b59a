"""What looks at a run while it goes on, and may stop it: the interface of hooks, and those that Panax brings."""

from .hook import Hook, RunView
from .showing import Histograms, Samples
from .stopping import EarlyStopping, TargetReached, TimeLimit

__all__ = ["EarlyStopping", "Histograms", "Hook", "RunView", "Samples", "TargetReached", "TimeLimit"]
