"""State that Python code can reach and change outside a module's tensors: watched while a module is traced,
and restored afterwards.

A trace treats every Python value as a constant. A number that each forward increments would be frozen silently, so the
values that the module and its loss can reach are compared between forwards. Tensors without values that a trace leaves
behind (in a list, or in a cache) would break the user's own module, so they are removed again.
"""

import collections
import inspect
import random
import re
import sys
import types
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions.utils import lazy_property

from .memory import memory_extent
from .python_opaque import is_iterator
from .python_seen import (
    FILE_PREFIX,
    MAX_BYTES,
    PLAIN_TYPES,
    SKIPPED_PACKAGES,
    SeenValue,
    ValueLocation,
    comparison_token,
    find_package,
    is_user_class,
)
from .python_values import INSPECTORS, inspect_object
from .surroundings import watched_function_ids

GENERATORS_OWNER = "the process"
"""Owner of the random generators that everything shares."""

NUMPY_OWNER = "NumPy's np.random"

_INSTALLED = re.compile(r"(site|dist)-packages")

HeldValue = tuple[Callable[[Any], None], Any]
"""A held value, with a function that replaces it."""


class PythonState:
    """Snapshot of everything that the roots reach.

    Attributes:
        tokens: Tokens for comparison, by location.
        fakes: The locations that hold a tensor of a trace.
        borrowed: Functions of `random` that code has imported under its own names, each with a function that
            replaces it.
        aliases: The module's own parameters and buffers that Python code holds too, each with a function that
            replaces it.
        iterators: Generators and other iterators that code holds, each with a function that replaces it.
        unfollowed: The locations of tensors that are views of the module's tensors, or that can't be replaced.
        outside: By id, tensors with values that are not the module's, with their locations.
        packages: Packages of the module and the loss.
    """

    def __init__(self, module: nn.Module, loss: Any, stand_ins: Mapping[int, torch.Tensor] = MappingProxyType({})):
        """
        Args:
            stand_ins: The module's own tensors by the ids of their stand-ins in a trace. If a forward has
                stored a stand-in in another location (recurrent layers list their weights again), it is
                replaced by the tensor.
        """
        self._names = {id(part): path for path, part in module.named_modules()}
        self.packages = {find_package(type(part)) for part in module.modules()} | {find_package(loss)}
        self.tokens: dict[ValueLocation, Any] = {}
        self.fakes: list[ValueLocation] = []
        self.borrowed: list[HeldValue] = []
        self.aliases: list[HeldValue] = []
        self.iterators: list[HeldValue] = []
        self.unfollowed: list[ValueLocation] = []
        self.outside: dict[int, tuple[ValueLocation, torch.Tensor]] = {}
        module_tensors = [*module.parameters(), *module.buffers()]
        self._watched = watched_function_ids()
        self._own = {id(tensor) for tensor in module_tensors}
        self._memory = {_memory_of(tensor) for tensor in module_tensors} - {None}
        self._extents = sorted(extent for tensor in module_tensors if (extent := memory_extent(tensor)) is not None)
        self._restores: list[Callable[[], None]] = []
        self._held: list[Any] = []  # so that no id is reused
        queue = collections.deque(
            [(ValueLocation(f"module {path or '(root)'}"), part) for path, part in module.named_modules()]
        )
        queue.append((ValueLocation("the loss"), loss))
        queue.append((ValueLocation(GENERATORS_OWNER, NUMPY_OWNER), _numpys_own()))
        queue.extend(
            (ValueLocation("a hook on all modules", name), held) for name, held in _hooks_on_all_modules().items()
        )
        visited: set[int] = set()
        while queue:
            location, value = queue.popleft()
            value = stand_ins.get(id(value), value)
            if isinstance(value, PLAIN_TYPES):
                self.tokens[location] = comparison_token(value)
                continue
            if id(value) in visited:
                continue
            visited.add(id(value))
            self._held.append(value)
            inspected = self._look(location, value)
            self.tokens[location] = inspected.token
            queue.extend(inspected.children)
            for put, held in inspected.borrowed:
                if id(held) in stand_ins:
                    held = stand_ins[id(held)]
                    put(held)
                if id(held) in self._own:
                    self.aliases.append((put, held))
                elif id(held) in self._watched or getattr(held, "__self__", None) is _pythons_own():
                    self.borrowed.append((put, held))
                elif is_iterator(held):
                    self.iterators.append((put, held))
            if isinstance(value, tuple) and any(id(each) in self._own for each in value):
                self.unfollowed.append(location)
            if isinstance(value, tuple) and any(id(each) in stand_ins for each in value):
                self.fakes.append(location)
            if inspected.restore is not None:
                self._restores.append(inspected.restore)

    def restore(self) -> None:
        """Restore all values."""
        for restore in self._restores:
            restore()

    def diff(self, before: "PythonState") -> list[tuple[ValueLocation, str, str]]:
        """List the locations with values that differ, with the value before and after."""
        absent = ("nothing", "nothing")
        return [
            (location, _shown(before.tokens.get(location, absent)), _shown(self.tokens.get(location, absent)))
            for location in {**self.tokens, **before.tokens}
            if before.tokens.get(location, absent) != self.tokens.get(location, absent)
        ]

    def _look(self, location: ValueLocation, value: Any) -> SeenValue:
        if isinstance(value, torch.Tensor):
            return self._tensor(location, value)
        if isinstance(value, nn.Module):
            owner = (
                ValueLocation(f"module {self._names.get(id(value), '') or '(root)'}")
                if id(value) in self._names
                else location
            )
            return inspect_object(owner, value, self._classes(type(value)))
        if isinstance(value, type | types.FunctionType) and not self._is_followed(value, location):
            return SeenValue(type(value).__name__)
        if isinstance(value, np.ndarray) and self._shares(value):
            self.unfollowed.append(location)
        for fits, look in INSPECTORS:
            if fits(value):
                return look(location, value)
        if is_user_class(type(value)):
            if isinstance(value, torch.distributions.Distribution):
                _forget_lazy(value)
            return inspect_object(location, value, self._classes(type(value)))
        return SeenValue(type(value).__name__)

    def _is_followed(self, code: Any, location: ValueLocation | None = None) -> bool:
        """Return True if a class or function is in a file that is not installed, or in an installed package
        of the model.

        In an installed package, classes are followed if they are the classes of objects, but not if a file only names
        them.
        """
        package = find_package(code)
        if package in SKIPPED_PACKAGES:
            return False
        file = getattr(sys.modules.get(package), "__file__", None) or ""
        if not _INSTALLED.search(file):
            return True
        return package in self.packages and (location is None or not isinstance(code, type) or not location.trail)

    def _shares(self, value: torch.Tensor | np.ndarray) -> bool:
        """Return True if an array shares memory with the module's tensors."""
        extent = memory_extent(value)
        return extent is not None and any(extent.overlaps(own) for own in self._extents)

    def _classes(self, cls: type) -> list[tuple[ValueLocation, type]]:
        return [(ValueLocation(f"class {base.__name__}"), base) for base in cls.__mro__ if self._is_followed(base)]

    def _tensor(self, location: ValueLocation, value: torch.Tensor) -> SeenValue:
        if type(value) is not torch.Tensor and not isinstance(value, nn.Parameter):
            self.fakes.append(location)
            return SeenValue("a tensor without values")
        if id(value) not in self._own:
            self.outside[id(value)] = (location, value)
        # A file's code need not use a name that is in it: the loss of a user's own loop may be one.
        computed = value.grad_fn is not None and not location.owner.startswith(FILE_PREFIX)
        if id(value) not in self._own and (computed or _memory_of(value) in self._memory or self._shares(value)):
            self.unfollowed.append(location)
        hooks = [
            (tensor_hooks or {})
            for tensor_hooks in (value._backward_hooks, getattr(value, "_post_accumulate_grad_hooks", None))
        ]
        children = [(location, hook) for held in hooks for hook in held.values()]
        module_owns = location.trail.startswith(("['_parameters']", "['_buffers']", "._parameters", "._buffers"))
        token = ("a tensor", tuple(value.shape), str(value.dtype))
        if module_owns or value.is_meta or value.layout != torch.strided or value.is_inference():
            return SeenValue(token, children)
        token = (*token, value._version)
        if value.numel() * value.element_size() > MAX_BYTES:
            return SeenValue(token, children)
        kept = value.detach().clone()

        def restore() -> None:
            if not torch.equal(value, kept):
                with torch.no_grad():
                    value.copy_(kept)

        return SeenValue(token, children, restore)


def _forget_lazy(distribution: Any) -> None:
    """Remove the values that a distribution has cached in a trace, so that it computes them again."""
    for name, held in list(vars(distribution).items()):
        if isinstance(held, FakeTensor) and isinstance(
            inspect.getattr_static(type(distribution), name, None), lazy_property
        ):
            delattr(distribution, name)


def _hooks_on_all_modules() -> dict[str, Any]:
    held = vars(nn.modules.module)
    return {name: each for name, each in held.items() if name.startswith("_global_") and isinstance(each, dict)}


def _pythons_own() -> random.Random:
    """Return the generator behind the functions of `random`."""
    return random.seed.__self__  # pyright: ignore[reportFunctionMemberAccess]


def _numpys_own() -> np.random.RandomState:
    return np.random.mtrand._rand  # pyright: ignore[reportAttributeAccessIssue]


def _memory_of(tensor: torch.Tensor) -> int | None:
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()


def _shown(token: Any) -> str:
    if isinstance(token, tuple) and token[0] in ("random generator", "array"):
        return f"one {token[0]}"
    if isinstance(token, tuple) and len(token) == 2:
        return token[1] if isinstance(token[1], str) else f"a {token[0]} of {token[1]}"
    return token if isinstance(token, str) else str(token[0])
