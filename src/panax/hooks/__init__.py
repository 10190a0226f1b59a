"""Hooks: the interface for code that observes, and may stop, a run, and the built-in hooks."""

from .hook import Hook, RunView
from .showing import Histograms, Samples
from .stopping import EarlyStopping, TargetReached, TimeLimit

__all__ = ["EarlyStopping", "Histograms", "Hook", "RunView", "Samples", "TargetReached", "TimeLimit"]
