"""What can't be traced is refused with the module and the line that does it."""

import contextlib
import linecache
import os
import traceback
from collections.abc import Iterator
from typing import Any

import jaxtyping
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from ...core.errors import PanaxError, RecipeError

_LIBRARY = (
    os.path.dirname(torch.__file__),
    os.path.dirname(jaxtyping.__file__),
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
)


@contextlib.contextmanager
def locating(module: nn.Module) -> Iterator[None]:
    """Turn what is raised inside into a RecipeError that names the module and the line of its code.

    Raises:
        RecipeError: Something was raised.
    """
    names = {id(part): path for path, part in module.named_modules()}
    running: list[nn.Module] = []

    def enter(part: nn.Module, inputs: Any) -> None:
        running.append(part)

    def leave(part: nn.Module, inputs: Any, output: Any) -> None:
        running.pop()

    hooks = (
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave),
    )
    try:
        yield
    except PanaxError:
        raise
    except Exception as error:
        inside = running[-1] if running else None
        where = (
            f"module {names.get(id(inside)) or '(root)'} ({type(inside).__name__})"
            if inside is not None
            else "the loss"
        )
        raise RecipeError(f"{where} can't be traced{_line(error)}: {_reason(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()


def _line(error: BaseException) -> str:
    """The innermost line that is neither PyTorch's nor ours."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_LIBRARY) and not frame.filename.startswith("<"):
            code = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f", at {frame.filename}:{frame.lineno} `{code}`"
    return ""


def _reason(error: Exception) -> str:
    if isinstance(error, DataDependentOutputException):
        return (
            "it turns a tensor's value into a Python number or a condition, and a compiled step is one program for all values; "
            "use torch.where, or masks, instead of `if`, `.item()` or `float()`"
        )
    if isinstance(error, DynamicOutputShapeException):
        return (
            f"the shape of {error.func} depends on values, and a compiled step has fixed shapes; use torch.where, or "
            "multiply by a "
            f"mask, instead of selecting by one"
        )
    if isinstance(error, UnsupportedOperatorException):
        return f"the operator {error.func} has no shape rule (a custom operator needs torch.library.register_fake)"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
