"""The place where everything meets: an experiment, and the loop that trains it."""

from .evaluating import evaluate
from .experiment import EvaluateConfig, Experiment
from .loop import Result, fit
from .on_data import on_data
from .plain import PlainStep, compile_step
from .prepare import prepare
from .trained import Trained
from .trained import load_trained as load
from .writing import continue_text

__all__ = [
    "EvaluateConfig",
    "Experiment",
    "PlainStep",
    "Result",
    "Trained",
    "compile_step",
    "continue_text",
    "evaluate",
    "fit",
    "load",
    "on_data",
    "prepare",
]
