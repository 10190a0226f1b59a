"""Rejection of modules that can't be traced, with the module and the line at fault."""

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.fx import traceback as fx_traceback

from ...core.errors import PanaxError, RecipeError
from .state.memory import find_overlaps, memory_extent
from .state.python_state import GENERATORS_OWNER, PythonState
from .state.randomness import INSTEAD, RandomnessError, format_line

MODULE_KEY = "panax_module"
"""Key, in a node's `custom` metadata, of the module that ran it."""


class ModuleTracker:
    """The stack of running modules, and observations of them.

    Attributes:
        drew: The first module that advanced NumPy's random generator; None if none has.
    """

    def __init__(self, module: nn.Module):
        self._names = {id(part): path for path, part in module.named_modules()}
        self._running: list[nn.Module] = []
        self._marks: list[Any] = []
        self._generator_state = _numpys_state()
        self.drew: str | None = None

    def enter(self, part: nn.Module, inputs: Any) -> None:
        self._look()
        self._running.append(part)
        meta = fx_traceback.current_meta
        self._marks.append(meta.get("custom"))
        meta["custom"] = {**(meta.get("custom") or {}), MODULE_KEY: self.where}

    def leave(self, part: nn.Module, inputs: Any, output: Any) -> None:
        self._look()
        self._running.pop()
        self._unmark()

    def close(self) -> None:
        """Remove from the stack the modules that an exception has left."""
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
        if now != self._generator_state and self.drew is None:
            self.drew = self.where
        self._generator_state = now

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
def locate_errors(
    module: nn.Module, failing: str = "can't be traced", where: Callable[[], str | None] | None = None
) -> Iterator[ModuleTracker]:
    """Turn any exception inside into a RecipeError that names the module and the line of its code.

    Args:
        where: Returns the name of the running code, if it is not a module's.

    Raises:
        RecipeError: An exception was raised.
    """
    located = ModuleTracker(module)
    hooks = (
        nn.modules.module.register_module_forward_pre_hook(located.enter),
        nn.modules.module.register_module_forward_hook(located.leave),
    )
    try:
        yield located
    except PanaxError:
        raise
    except Exception as error:
        running = (where() if where is not None else None) or located.where
        raise RecipeError(
            f"{running} {failing}{format_line(traceback.extract_tb(error.__traceback__))}: {_reason(error)}"
        ) from error
    finally:
        located.close()
        for hook in hooks:
            hook.remove()


def refuse_leaks(after: PythonState) -> None:
    """Raise if a forward has stored a tensor outside of buffers, since the next step would not see it."""
    for place in after.fakes:
        raise RecipeError(
            f"{place.owner} keeps a tensor in {place.display_name}, which a compiled step would lose; make it a "
            f"buffer: self.register_buffer(...), or compute it at the point of use"
        )


def refuse_views(before: PythonState) -> None:
    """Raise if Python code holds a value derived from a parameter, or an irreplaceable parameter."""
    for place in before.unfollowed:
        raise RecipeError(
            f"{place.owner} holds a view of a parameter or buffer, a tensor computed from one, or a tuple of them, in "
            f"{place.display_name}; a trained model would keep its initial values. Compute it in the forward, or "
            "keep it in a list"
        )


def refuse_values(graph: torch.fx.GraphModule) -> None:
    """Raise if a tensor's value was requested, even if an `except` in the model has swallowed the error."""
    for node in graph.graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _OF_VALUES:
            module = (node.meta.get("custom") or {}).get(MODULE_KEY) or "the loss"
            raise RecipeError(
                f"{module} can't be traced: it catches the error of {str(node.target).replace('aten.', 'torch.')}, by "
                "which it turns "
                "a tensor's value into a Python number, a condition or a shape, and a compiled step is one program for "
                "all values; "
                f"use torch.where, or masks, and no `try` around it"
            )


_OF_VALUES = {
    getattr(torch.ops.aten, name)
    for name in (
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "nonzero",
        "masked_select",
        "equal",
        "_unique2",
        "unique_dim",
    )
}


def refuse_shared_memory(module: nn.Module, written: set[str]) -> None:
    """Raise if a parameter, or a buffer that the forward writes, shares memory with another tensor."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    moving = written | {name for name, p in module.named_parameters() if p.requires_grad}
    for a, b in find_overlaps(tensors):
        if a in moving or b in moving:
            raise RecipeError(
                f"{a} and {b} share memory, as one that is made of the other does (nn.Parameter(x.t()), y.data = x.data, "
                f"x.data[0]): in PyTorch both move at once, and here they are two arrays. Tie them as one parameter "
                f"(second.weight = first.weight), or compute one of the other in the forward"
            )


def refuse_changes(before: PythonState, after: PythonState, located: ModuleTracker) -> None:
    """Raise if a further forward has changed a Python value again."""
    for place, old_value, new_value in after.diff(before):
        if place.owner == GENERATORS_OWNER:
            raise RecipeError(f"{located.drew or 'the forward'} draws numbers from {place.trail}, {INSTEAD}")
        change = "" if old_value == new_value else f" (from {old_value} to {new_value})"
        if _A_BUFFER.search(place.trail):
            raise RecipeError(
                f"{place.owner} changes {place.display_name} in each forward, a buffer of a module that is not the adapted "
                "module's, which a "
                f"compiled step would hold fixed; hold that module in the adapted one: module.criterion = criterion"
            )
        raise RecipeError(
            f"{place.owner} changes {place.display_name} in each forward{change}, which a compiled step would hold "
            "fixed; make it a "
            f"buffer that the forward updates: self.register_buffer(..., torch.tensor(...))"
        )


_A_BUFFER = re.compile(r"_buffers'?\['\w+'\]$")


def refuse_changed_constants(graph: torch.fx.GraphModule, before: PythonState) -> None:
    """Raise if a forward writes to a tensor that is neither the module's nor created in the forward."""
    for node in graph.graph.nodes:
        if not (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable and node.args):
            continue
        base: Any = node.args[0]
        while getattr(base, "op", "") == "call_function" and getattr(base.target, "overloadpacket", None) in _VIEWING:
            base = base.args[0]
        constant = getattr(graph, str(base.target), None) if getattr(base, "op", "") == "get_attr" else None
        for place, tensor in before.outside.values():
            if constant is tensor or (constant is not None and _same_memory(constant, tensor)):
                raise RecipeError(
                    f"{place.owner} changes the tensor {place.display_name} in each forward, which a compiled step would hold "
                    "fixed; make it a "
                    f"buffer: self.register_buffer(...)"
                )


_VIEWING = {
    getattr(torch.ops.aten, name)
    for name in (
        "detach",
        "alias",
        "view",
        "_unsafe_view",
        "slice",
        "select",
        "t",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
    )
}


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    first, second = memory_extent(a), memory_extent(b)
    return first is not None and second is not None and first.overlaps(second)


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
    if isinstance(error, RandomnessError):
        return str(error)
    if isinstance(error, UnsupportedOperatorException):
        return f"the operator {error.func} has no shape rule (a custom operator needs torch.library.register_fake)"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
