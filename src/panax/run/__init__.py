"""The place where everything meets: an experiment, and the loop that trains it."""

from .experiment import EvaluateConfig, Experiment
from .loop import Result, fit
from .prepare import prepare

__all__ = ["EvaluateConfig", "Experiment", "Result", "fit", "prepare"]
