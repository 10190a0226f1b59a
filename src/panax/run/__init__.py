"""The place where everything meets: an experiment, and the loop that trains it."""

from .checking import check
from .evaluating import evaluate
from .experiment import EvaluateConfig, Experiment, ProbeConfig, RewindConfig, VerifyConfig
from .finding_batch import BatchSearch, find_batch
from .finding_rate import RateSearch, find_lr
from .fitting import fit, open_run
from .loop import Run
from .on_data import replace_data
from .plain import PlainStep, compile_step
from .prepare import prepare
from .result import Result
from .sweeping import Sweep, sweep
from .trained import LoadedModel
from .trained import load_trained as load
from .writing import continue_text

__all__ = [
    "BatchSearch",
    "EvaluateConfig",
    "Experiment",
    "LoadedModel",
    "PlainStep",
    "ProbeConfig",
    "RateSearch",
    "Result",
    "RewindConfig",
    "Run",
    "Sweep",
    "VerifyConfig",
    "check",
    "compile_step",
    "continue_text",
    "evaluate",
    "find_batch",
    "find_lr",
    "fit",
    "load",
    "open_run",
    "prepare",
    "replace_data",
    "sweep",
]
