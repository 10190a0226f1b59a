"""The place where everything meets: an experiment, and the loop that trains it."""

from .experiment import EvaluateConfig, Experiment
from .loop import Result, fit
from .plain import PlainStep, compile_step
from .prepare import prepare
from .writing import continue_text

__all__ = ["EvaluateConfig", "Experiment", "PlainStep", "Result", "compile_step", "continue_text", "fit", "prepare"]
