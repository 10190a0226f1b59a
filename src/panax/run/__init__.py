"""Experiments and their runs: `Experiment` and the training loop, which uses all other packages."""

from ..generate.scoring import QuestionConfig
from .data_override import replace_data
from .entry import fit, open_run
from .experiment import EvaluateConfig, Experiment, ProbeConfig, RollbackConfig, VerifyConfig
from .folder.trained_model import LoadedModel, evaluate
from .folder.trained_model import load_model as load
from .loop import Run
from .plain_step import PlainStep, compile_step
from .preparation import prepare
from .replay.branch import branch
from .replay.opened_step import at
from .replay.step_view import StepView
from .reporting.generation import TextModel, generate_text
from .result import Result
from .tools.batch_search import BatchSearch, find_batch
from .tools.check import check
from .tools.lr_curve import RateSearch
from .tools.lr_search import find_lr
from .tools.reference import add_reference
from .tools.sweep import Sweep, sweep
from .tools.teacher import add_teacher

__all__ = [
    "BatchSearch", "EvaluateConfig", "Experiment", "LoadedModel", "PlainStep", "ProbeConfig", "QuestionConfig",
    "RateSearch", "Result", "RollbackConfig", "Run", "StepView", "Sweep", "TextModel", "VerifyConfig", "add_reference",
    "add_teacher", "at", "branch", "check", "compile_step", "evaluate", "find_batch", "find_lr", "fit", "generate_text", "load",
    "open_run", "prepare", "replace_data", "sweep",
]  # fmt: skip
