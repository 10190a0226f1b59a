"""Panax trains large models on any number of accelerators, on JAX.

Nothing heavy is imported until it is used: a supervisor that only checks a layout never loads jax.
"""

from typing import TYPE_CHECKING

from .core.lazy import lazily

if TYPE_CHECKING:
    from . import adapters
    from .core import Task, debugging
    from .run import Experiment, Result, compile_step, fit
    from .train import CompiledStep, Program

__version__ = "0.1.1"

__getattr__ = lazily(
    __name__,
    {
        "core": ("Task", "debugging"),
        "run": ("Experiment", "Result", "compile_step", "fit"),
        "train": ("CompiledStep", "Program"),
    },
    rooms=("adapters",),
)

__all__ = [
    "CompiledStep", "Experiment", "Program", "Result", "Task", "__version__", "adapters", "compile_step", "debugging", "fit",
]  # fmt: skip
