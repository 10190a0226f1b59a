"""Panax trains large models on any number of accelerators, on JAX.

Nothing heavy is imported until it is used: a supervisor that only checks a layout never loads jax.
"""

from typing import TYPE_CHECKING

from .core.lazy import lazily

if TYPE_CHECKING:
    from .core import Task, debugging
    from .run import Experiment, Result, fit
    from .train import CompiledStep, Program

__version__ = "0.1.0"

__getattr__ = lazily(
    __name__,
    {"core": ("Task", "debugging"), "run": ("Experiment", "Result", "fit"), "train": ("CompiledStep", "Program")},
)

__all__ = ["CompiledStep", "Experiment", "Program", "Result", "Task", "__version__", "debugging", "fit"]
