"""The training step: definition, compilation, evaluation, and debugging."""

from .compiled_step import CompiledStep
from .evaluation import evaluate_all, evaluate_sent
from .parts.step_part import DenseUpdate, StepFacts, StepInputs, StepOutcome, StepPart
from .program import Program
from .update import Scalars, StepConfig, train_step

__all__ = [
    "CompiledStep",
    "DenseUpdate",
    "Program",
    "Scalars",
    "StepConfig",
    "StepFacts",
    "StepInputs",
    "StepOutcome",
    "StepPart",
    "evaluate_all",
    "evaluate_sent",
    "train_step",
]  # fmt: skip
