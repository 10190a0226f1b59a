"""What can't be traced is refused with the module and the line that does it."""

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx import traceback as fx_traceback

from ...core.errors import PanaxError, RecipeError
from .python_state import GENERATORS, PythonState
from .randomness import INSTEAD, Drawn, line_of

MODULE = "panax_module"
"""The key, in a node's `custom` metadata, of the module that ran it."""


class Located:
    """Which modules run, and what was seen of them.

    Attributes:
        drew: The first module that moved NumPy's random generator; None where none has.
    """

    def __init__(self, module: nn.Module):
        self._names = {id(part): path for path, part in module.named_modules()}
        self._running: list[nn.Module] = []
        self._marks: list[Any] = []
        self._drawn = _numpys_state()
        self.drew: str | None = None

    def enter(self, part: nn.Module, inputs: Any) -> None:
        self._look()
        self._running.append(part)
        meta = fx_traceback.current_meta
        self._marks.append(meta.get("custom"))
        meta["custom"] = {**(meta.get("custom") or {}), MODULE: self.where}

    def leave(self, part: nn.Module, inputs: Any, output: Any) -> None:
        self._look()
        self._running.pop()
        self._unmark()

    def close(self) -> None:
        """Leave the modules that an exception has left."""
        while self._marks:
            self._unmark()

    def _unmark(self) -> None:
        before, meta = self._marks.pop(), fx_traceback.current_meta
        if before is None:
            meta.pop("custom", None)
        else:
            meta["custom"] = before

    def _look(self) -> None:
        now = _numpys_state()
        if now != self._drawn and self.drew is None:
            self.drew = self.where
        self._drawn = now

    @property
    def where(self) -> str:
        inside = self._running[-1] if self._running else None
        if inside is None:
            return "the loss"
        return f"module {self._names.get(id(inside)) or '(root)'} ({type(inside).__name__})"


def _numpys_state() -> tuple[Any, ...]:
    kind, keys, place, *_ = np.random.get_state()
    return (kind, hash(np.asarray(keys).tobytes()), place)


@contextlib.contextmanager
def locating(module: nn.Module, failing: str = "can't be traced") -> Iterator[Located]:
    """Turn what is raised inside into a RecipeError that names the module and the line of its code.

    Raises:
        RecipeError: Something was raised.
    """
    located = Located(module)
    hooks = (
        nn.modules.module.register_module_forward_pre_hook(located.enter),
        nn.modules.module.register_module_forward_hook(located.leave),
    )
    try:
        yield located
    except PanaxError:
        raise
    except Exception as error:
        raise RecipeError(
            f"{located.where} {failing}{line_of(traceback.extract_tb(error.__traceback__))}: {_reason(error)}"
        ) from error
    finally:
        located.close()
        for hook in hooks:
            hook.remove()


def refuse_leaks(after: PythonState) -> None:
    """Raise where a forward has left a tensor in something other than a buffer: a next step would not see it."""
    for place in after.fakes:
        raise RecipeError(
            f"{place.owner} keeps a tensor in {place.shown}, which a compiled step would lose; make it a buffer: "
            f"self.register_buffer(...), or compute it where it is used"
        )


def refuse_views(before: PythonState) -> None:
    """Raise where Python code holds what a parameter was made into, or a parameter where nothing can stand in for it."""
    for place in before.unfollowed:
        raise RecipeError(
            f"{place.owner} holds a view of a parameter or buffer, a tensor computed from one, or a tuple of them, in "
            f"{place.shown}; a trained model would go on with its first values. Compute it in the forward, or keep it in a list"
        )


def refuse_changes(before: PythonState, after: PythonState, located: Located) -> None:
    """Raise where a further forward has changed a Python value again."""
    for place, was, now in after.changed_since(before):
        if place.owner == GENERATORS:
            raise RecipeError(f"{located.drew or 'the forward'} draws numbers from {place.trail}, {INSTEAD}")
        change = "" if was == now else f" (from {was} to {now})"
        raise RecipeError(
            f"{place.owner} changes {place.shown} in each forward{change}, which a compiled step would hold fixed; make it a "
            f"buffer that the forward updates: self.register_buffer(..., torch.tensor(...))"
        )


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
    if isinstance(error, Drawn):
        return str(error)
    if isinstance(error, UnsupportedOperatorException):
        return f"the operator {error.func} has no shape rule (a custom operator needs torch.library.register_fake)"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
