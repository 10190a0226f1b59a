"""Panax trains large models on any number of accelerators, on JAX.

Nothing heavy is imported until it is used: a supervisor that only checks a layout never loads jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core import Task, debugging
    from .run import Experiment, Result, fit
    from .train import CompiledStep, Program

__version__ = "0.1.0"

_PUBLIC = {
    "CompiledStep": "train",
    "Experiment": "run",
    "Program": "train",
    "Result": "run",
    "Task": "core",
    "debugging": "core",
    "fit": "run",
}

__all__ = ["CompiledStep", "Experiment", "Program", "Result", "Task", "__version__", "debugging", "fit"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
