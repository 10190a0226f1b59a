"""What Python code can reach and change besides a module's tensors: watched while a module is traced, and put back afterwards.

A trace holds every Python value at what it was. A number that each forward counts up, wherever it is kept, would be fixed without
a word; so the values that the module and its loss can reach are compared between forwards. What a forward on tensors without
values leaves behind (a tensor in a list, an entry of a cache) would break the user's own module; so all of it is put back.
"""

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import hashlib
import itertools
import random
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_SIMPLE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    np.generic,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
)
_SKIPPED = sys.stdlib_module_names | {"torch", "numpy", "jax", "jaxlib", "panax", "lightning", "pytorch_lightning"}
"""Packages whose objects and functions are not looked into; containers and generators of the standard library are."""

GENERATORS = "the process"
"""The owner of the random generators that everything shares."""

FILE = "the file of "
"""What the owner of a global begins with."""

NUMPYS = "NumPy's np.random"

_INSTALLED = re.compile(r"(site|dist)-packages")

MOST_ENTRIES = 10_000
"""Entries of a container that are looked at: a vocabulary or a data set is not a count."""

MOST_BYTES = 2**26
"""An array or tensor of more is not copied."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a value is.

    Attributes:
        owner: What holds it: "module layers.0", "the loss", "class Block", "module-level code of model".
        trail: Its name there, as code would write it.
    """

    owner: str
    trail: str = ""

    @property
    def shown(self) -> str:
        """Its name, in quotes where it is a plain one."""
        quoted = re.fullmatch(r"'(\w+)'(.*)", self.trail, re.DOTALL)
        return f"'{quoted[1]}{quoted[2]}'" if quoted else self.trail or "itself"

    def under(self, part: str) -> "Place":
        return Place(self.owner, self.trail + part)


@dataclasses.dataclass
class _Seen:
    """One value that was met: its token for comparison, what it holds, and how it is put back."""

    token: Any
    children: Iterable[tuple[Place, Any]] = ()
    restore: Callable[[], None] | None = None
    borrowed: Iterable[tuple[Callable[[Any], None], Any]] = ()


Put = tuple[Callable[[Any], None], Any]
"""What is held somewhere, with what puts another thing there."""


class PythonState:
    """Everything that the roots reach, as it is now.

    Attributes:
        tokens: What was seen, by place, to be compared.
        fakes: The places that hold a tensor of a trace.
        borrowed: Functions of `random` that code holds by names of its own, each with what puts another there.
        aliases: The module's own parameters and buffers where Python code holds them too, each with what puts another there.
        unfollowed: The places of tensors that are views of those, or that nothing can be put in the place of.
    """

    def __init__(self, module: nn.Module, loss: Any):
        self._names = {id(part): path for path, part in module.named_modules()}
        self._packages = {_root(type(part)) for part in module.modules()} | {_root(loss)}
        self.tokens: dict[Place, Any] = {}
        self.fakes: list[Place] = []
        self.borrowed: list[Put] = []
        self.aliases: list[Put] = []
        self.unfollowed: list[Place] = []
        own = [*module.parameters(), *module.buffers()]
        self._own = {id(tensor) for tensor in own}
        self._memory = {_memory_of(tensor) for tensor in own} - {None}
        self._restores: list[Callable[[], None]] = []
        self._held: list[Any] = []  # so that no id is used twice
        queue = collections.deque(
            [(Place(f"module {path or '(root)'}"), part) for path, part in module.named_modules()]
        )
        queue.append((Place("the loss"), loss))
        queue.append((Place(GENERATORS, NUMPYS), _numpys_own()))
        met: set[int] = set()
        while queue:
            place, value = queue.popleft()
            if isinstance(value, _SIMPLE):
                self.tokens[place] = _simple(value)
                continue
            if id(value) in met:
                continue
            met.add(id(value))
            self._held.append(value)
            seen = self._look(place, value)
            self.tokens[place] = seen.token
            queue.extend(seen.children)
            self.borrowed.extend(pair for pair in seen.borrowed if getattr(pair[1], "__self__", None) is _pythons_own())
            self.aliases.extend(pair for pair in seen.borrowed if id(pair[1]) in self._own)
            if isinstance(value, tuple) and any(id(each) in self._own for each in value):
                self.unfollowed.append(place)
            if seen.restore is not None:
                self._restores.append(seen.restore)

    def restore(self) -> None:
        """Put everything back to what it was."""
        for restore in self._restores:
            restore()

    def changed_since(self, before: "PythonState") -> list[tuple[Place, str, str]]:
        """The places whose values differ, with what they were and what they are."""
        absent = ("nothing", "nothing")
        return [
            (place, _shown(before.tokens.get(place, absent)), _shown(self.tokens.get(place, absent)))
            for place in {**self.tokens, **before.tokens}
            if before.tokens.get(place, absent) != self.tokens.get(place, absent)
        ]

    def _look(self, place: Place, value: Any) -> _Seen:
        if isinstance(value, torch.Tensor):
            return self._tensor(place, value)
        if isinstance(value, nn.Module):
            owner = Place(f"module {self._names.get(id(value), '') or '(root)'}") if id(value) in self._names else place
            return _instance(owner, value, self._classes(type(value)))
        if isinstance(value, type | types.FunctionType) and not self._is_followed(value, place):
            return _Seen(type(value).__name__)
        for kind, look in _LOOKS:
            if isinstance(value, kind):
                return look(place, value)
        if _is_users(type(value)):
            return _instance(place, value, self._classes(type(value)))
        return _Seen(type(value).__name__)

    def _is_followed(self, code: Any, place: Place | None = None) -> bool:
        """Whether a class or function is of a file that is not installed, or of an installed package that the model is of.

        Of the latter, classes are followed where they are those of objects, and not wherever a file names them.
        """
        root = _root(code)
        if root in _SKIPPED:
            return False
        file = getattr(sys.modules.get(root), "__file__", None) or ""
        if not _INSTALLED.search(file):
            return True
        return root in self._packages and (place is None or not isinstance(code, type) or not place.trail)

    def _classes(self, cls: type) -> list[tuple[Place, type]]:
        return [(Place(f"class {base.__name__}"), base) for base in cls.__mro__ if self._is_followed(base)]

    def _tensor(self, place: Place, value: torch.Tensor) -> _Seen:
        if type(value) is not torch.Tensor and not isinstance(value, nn.Parameter):
            self.fakes.append(place)
            return _Seen("a tensor without values")
        # Code of a file need not use a name that stands in it: the loss of a user's own loop may be one.
        computed = value.grad_fn is not None and not place.owner.startswith(FILE)
        if id(value) not in self._own and (computed or _memory_of(value) in self._memory):
            self.unfollowed.append(place)
        hooks = [
            (tensor_hooks or {})
            for tensor_hooks in (value._backward_hooks, getattr(value, "_post_accumulate_grad_hooks", None))
        ]
        children = [(place, hook) for held in hooks for hook in held.values()]
        module_owns = place.trail.startswith(("['_parameters']", "['_buffers']", "._parameters", "._buffers"))
        token = ("a tensor", tuple(value.shape), str(value.dtype))
        if module_owns or value.is_meta or value.layout != torch.strided or value.is_inference():
            return _Seen(token, children)
        token = (*token, value._version)
        if value.numel() * value.element_size() > MOST_BYTES:
            return _Seen(token, children)
        kept = value.detach().clone()

        def restore() -> None:
            if not torch.equal(value, kept):
                with torch.no_grad():
                    value.copy_(kept)

        return _Seen(token, children, restore)


def _pythons_own() -> random.Random:
    """The generator behind the functions of `random`."""
    return random.seed.__self__  # pyright: ignore[reportFunctionMemberAccess]


def _numpys_own() -> np.random.RandomState:
    return np.random.mtrand._rand  # pyright: ignore[reportAttributeAccessIssue]


def _memory_of(tensor: torch.Tensor) -> int | None:
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()


def _simple(value: Any) -> Any:
    return (type(value).__name__, repr(value))


def _shown(token: Any) -> str:
    if isinstance(token, tuple) and token[0] in ("random generator", "array"):
        return f"one {token[0]}"
    if isinstance(token, tuple) and len(token) == 2:
        return token[1] if isinstance(token[1], str) else f"a {token[0]} of {token[1]}"
    return token if isinstance(token, str) else str(token[0])


def _root(code: Any) -> str:
    return (getattr(code, "__module__", None) or "builtins").split(".")[0]


def _is_users(cls: type) -> bool:
    return _root(cls) not in _SKIPPED or cls is types.SimpleNamespace


def _instance(place: Place, value: Any, classes: list[tuple[Place, type]]) -> _Seen:
    held = getattr(value, "__dict__", None)
    children: list[tuple[Place, Any]] = [*classes]
    slots = [name for cls in type(value).__mro__ for name in _slots(cls)]
    kept = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    children += [(place.under(f".{name}" if place.trail else repr(name)), each) for name, each in kept.items()]
    if isinstance(held, dict):
        children += [(place.under(f".{name}" if place.trail else repr(name)), each) for name, each in held.items()]
        shallow = {name: _unadvanced(each) for name, each in held.items()}
        held_ = held

        def restore() -> None:
            _refill(held_, shallow)
            for name, each in kept.items():
                object.__setattr__(value, name, each)

        return _Seen(type(value).__name__, _but_mode(children), restore, _entries(held))
    return _Seen(type(value).__name__, children)


def _but_mode(children: list[tuple[Place, Any]]) -> list[tuple[Place, Any]]:
    return [(place, each) for place, each in children if not place.trail.endswith(("'training'", ".training"))]


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__") and _is_users(cls)]


def _entries(held: dict[str, Any]) -> list[tuple[Callable[[Any], None], Any]]:
    return _entries_of(held, held)


def _entries_of(held: dict[str, Any], names: Iterable[str]) -> list[tuple[Callable[[Any], None], Any]]:
    return [(functools.partial(held.__setitem__, name), held[name]) for name in names]


def _unadvanced(value: Any) -> Any:
    """A count in a copy, since nothing sets one back; anything else as it is."""
    return copy.copy(value) if type(value) is itertools.count else value


def _is_same(now: Any, kept: Any) -> bool:
    return now is kept or (type(kept) is itertools.count and repr(now) == repr(kept))


def _refill(held: dict[Any, Any], kept: Mapping[Any, Any]) -> None:
    if len(held) != len(kept) or any(name not in held or not _is_same(held[name], each) for name, each in kept.items()):
        held.clear()
        held.update(kept)


def _dict(place: Place, value: dict[Any, Any]) -> _Seen:
    kept = {key: _unadvanced(each) for key, each in value.items()}
    entries = itertools.islice(value.items(), MOST_ENTRIES)
    children = [(place.under(f"[{_key(i, k)}]"), each) for i, (k, each) in enumerate(entries)]
    owned = place.trail.endswith(_OWNED)
    borrowed = [] if owned else [(functools.partial(value.__setitem__, key), each) for key, each in kept.items()]
    return _Seen(("dictionary", len(value)), children, lambda: _refill(value, kept), borrowed)


_OWNED = ("'_parameters'", "'_buffers'", "._parameters", "._buffers")


def _key(index: int, key: Any) -> str:
    return repr(key) if isinstance(key, _SIMPLE) else f"entry {index}"


def _sequence(place: Place, value: Any) -> _Seen:
    children = [(place.under(f"[{i}]"), each) for i, each in enumerate(itertools.islice(value, MOST_ENTRIES))]
    token = (type(value).__name__, len(value))
    if isinstance(value, tuple):
        return _Seen(token, children)
    kept = list(value)

    def restore() -> None:
        if len(value) != len(kept) or any(a is not b for a, b in zip(value, kept)):
            value.clear()
            value.extend(kept)

    return _Seen(
        token, children, restore, [(functools.partial(value.__setitem__, i), each) for i, each in enumerate(kept)]
    )


def _set(place: Place, value: set[Any]) -> _Seen:
    kept = set(value)

    def restore() -> None:
        if value != kept:
            value.clear()
            value.update(kept)

    return _Seen(("set", len(value)), (), restore)


def _array(place: Place, value: np.ndarray) -> _Seen:
    token = ("array", value.shape, str(value.dtype))
    if value.nbytes > MOST_BYTES or value.dtype.hasobject:
        return _Seen(token)
    kept = value.copy()

    def restore() -> None:
        if value.flags.writeable:
            value[...] = kept

    return _Seen((*token, hashlib.sha256(kept.tobytes()).hexdigest()), (), restore)


def _function(place: Place, value: types.FunctionType) -> _Seen:
    where = Place(f"function {value.__qualname__}")
    children: list[tuple[Place, Any]] = []
    cells = []
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
        with contextlib.suppress(ValueError):  # not filled yet
            children.append((where.under(repr(name)), cell.cell_contents))
            cells.append((cell, _unadvanced(cell.cell_contents)))
    defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), value.__dict__]
    children += [(where.under(f"'default {i}'"), each) for i, each in enumerate(defaults)]
    used = set(_names(value.__code__))
    children += _named_in(value.__module__, value.__globals__, used, set())
    kept = {name: value.__globals__[name] for name in used if name in value.__globals__}

    def restore() -> None:
        for cell, each in cells:
            if not _is_same(cell.cell_contents, each):
                cell.cell_contents = each
        value.__globals__.update(kept)

    borrowed = [(functools.partial(setattr, cell, "cell_contents"), each) for cell, each in cells]
    return _Seen("function", children, restore, [*borrowed, *_entries_of(value.__globals__, kept)])


def _named_in(file: str, held: Mapping[str, Any], used: set[str], met: set[str]) -> Iterator[tuple[Place, Any]]:
    """What code that uses these names may reach of a file, and of the files that it names there."""
    met.add(file)
    for name in sorted(used & held.keys()):
        value = held[name]
        if not isinstance(value, types.ModuleType):
            yield Place(FILE + file, repr(name)), value
        elif value.__name__ not in met and value.__name__.split(".")[0] not in _SKIPPED:
            yield from _named_in(value.__name__, vars(value), used, met)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _class(place: Place, value: type) -> _Seen:
    place = Place(f"class {value.__name__}")
    held = {name: each for name, each in vars(value).items() if not name.startswith("__")}
    children = [(place.under(repr(name)), each) for name, each in held.items()]

    def restore() -> None:
        for name, each in held.items():
            if vars(value).get(name) is not each:
                type.__setattr__(value, name, each)

    return _Seen("class", children, restore)


def _wrapped(place: Place, value: Any) -> _Seen:
    names = ("__self__", "__func__", "func", "args", "keywords", "fget", "__wrapped__")
    return _Seen(
        type(value).__name__, [(place, getattr(value, n)) for n in names if getattr(value, n, None) is not None]
    )


def _generator(place: Place, value: Any) -> _Seen:
    get, put = _STATES[next(kind for kind in _STATES if isinstance(value, kind))]
    kept = get(value)
    return _Seen(("random generator", _fingerprint(kept)), (), lambda: put(value, kept))


def _fingerprint(state: Any) -> Any:
    if isinstance(state, dict):
        return tuple((name, _fingerprint(each)) for name, each in state.items())
    if isinstance(state, tuple):
        return hash(tuple(map(_fingerprint, state)))
    return hash(state.tobytes()) if isinstance(state, np.ndarray) else state


def _set_bits(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


_STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    random.Random: (lambda g: g.getstate(), lambda g, s: g.setstate(s)),
    np.random.Generator: (lambda g: g.bit_generator.state, _set_bits),
    np.random.RandomState: (lambda g: g.get_state(), lambda g, s: g.set_state(s)),
    torch.Generator: (
        lambda g: bytes(g.get_state().numpy()),
        lambda g, s: g.set_state(torch.tensor(list(s), dtype=torch.uint8)),
    ),
}

_LOOKS: tuple[tuple[Any, Callable[[Place, Any], _Seen]], ...] = (
    (tuple(_STATES), _generator),
    (dict, _dict),
    ((list, tuple, collections.deque), _sequence),
    (set, _set),
    (np.ndarray, _array),
    (types.FunctionType, _function),
    (type, _class),
    ((types.MethodType, functools.partial, staticmethod, classmethod, property), _wrapped),
    (itertools.count, lambda place, value: _Seen(("count", repr(value)))),
)
