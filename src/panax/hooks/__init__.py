"""Hooks: the interface for code that observes, and may stop, a run, and the built-in hooks."""

from .early_stop import EarlyStopping, TargetReached, TimeLimit
from .hook import Hook, RunView
from .samples import Histograms, Samples

__all__ = ["EarlyStopping", "Histograms", "Hook", "RunView", "Samples", "TargetReached", "TimeLimit"]
