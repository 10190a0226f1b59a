"""Inspection of one Python value that code reaches: its comparison, its contents, and its restoration."""

import array
import collections
import contextlib
import contextvars
import copy
import ctypes
import functools
import hashlib
import itertools
import mmap
import random
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from .python_opaque import (
    GENERATORS,
    inspect_context_variable,
    inspect_generator,
    inspect_iterator,
    inspect_memory,
    inspect_reference,
    is_iterator,
)
from .python_seen import (
    FILE_PREFIX,
    MAX_BYTES,
    MAX_ENTRIES,
    PLAIN_TYPES,
    SKIPPED_PACKAGES,
    SeenValue,
    ValueLocation,
    comparison_token,
    is_user_class,
)


def inspect_object(location: ValueLocation, value: Any, classes: list[tuple[ValueLocation, type]]) -> SeenValue:
    held = getattr(value, "__dict__", None)
    children: list[tuple[ValueLocation, Any]] = [*classes]
    slots = [name for cls in type(value).__mro__ for name in _slots(cls)]
    saved = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    children += [(location.under(f".{name}" if location.trail else repr(name)), each) for name, each in saved.items()]
    if isinstance(held, dict):
        children += [
            (location.under(f".{name}" if location.trail else repr(name)), each) for name, each in held.items()
        ]
        shallow = {name: _copy_count(each) for name, each in held.items()}
        held_ = held

        def restore() -> None:
            _refill(held_, shallow)
            for name, each in saved.items():
                object.__setattr__(value, name, each)

        return SeenValue(type(value).__name__, _but_mode(children), restore, _entries(held))
    return SeenValue(type(value).__name__, children)


def _but_mode(children: list[tuple[ValueLocation, Any]]) -> list[tuple[ValueLocation, Any]]:
    return [(location, each) for location, each in children if not location.trail.endswith(("'training'", ".training"))]


def _slots(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__") and is_user_class(cls)]


def _entries(namespace: dict[str, Any]) -> list[tuple[Callable[[Any], None], Any]]:
    return _entries_of(namespace, namespace)


def _entries_of(namespace: dict[str, Any], names: Iterable[str]) -> list[tuple[Callable[[Any], None], Any]]:
    return [(functools.partial(namespace.__setitem__, name), namespace[name]) for name in names]


def _copy_count(value: Any) -> Any:
    """Return a copy of an `itertools.count`, which can't be reset; other values themselves."""
    return copy.copy(value) if type(value) is itertools.count else value


def _is_same(value: Any, saved: Any) -> bool:
    return value is saved or (type(saved) is itertools.count and repr(value) == repr(saved))


def _refill(target: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    if len(target) != len(saved) or any(
        name not in target or not _is_same(target[name], each) for name, each in saved.items()
    ):
        target.clear()
        target.update(saved)


def _dict(location: ValueLocation, value: dict[Any, Any]) -> SeenValue:
    saved = {key: _copy_count(each) for key, each in value.items()}
    entries = itertools.islice(value.items(), MAX_ENTRIES)
    children = [(location.under(f"[{_key(i, k)}]"), each) for i, (k, each) in enumerate(entries)]
    owned = location.trail.endswith(_OWNED)
    borrowed = [] if owned else [(functools.partial(value.__setitem__, key), each) for key, each in saved.items()]
    return SeenValue(("dictionary", len(value)), children, lambda: _refill(value, saved), borrowed)


_OWNED = ("'_parameters'", "'_buffers'", "._parameters", "._buffers")


def _key(index: int, key: Any) -> str:
    return repr(key) if isinstance(key, PLAIN_TYPES) else f"entry {index}"


def _sequence(location: ValueLocation, value: Any) -> SeenValue:
    children = [(location.under(f"[{i}]"), each) for i, each in enumerate(itertools.islice(value, MAX_ENTRIES))]
    token = (type(value).__name__, len(value))
    if isinstance(value, tuple):
        return SeenValue(token, children)
    saved = list(value)

    def restore() -> None:
        if len(value) != len(saved) or any(a is not b for a, b in zip(value, saved)):
            value.clear()
            value.extend(saved)

    return SeenValue(
        token, children, restore, [(functools.partial(value.__setitem__, i), each) for i, each in enumerate(saved)]
    )


def _set(location: ValueLocation, value: set[Any] | frozenset[Any]) -> SeenValue:
    entries = list(itertools.islice(value, MAX_ENTRIES))
    plain = frozenset(comparison_token(each) for each in entries if isinstance(each, PLAIN_TYPES))
    children = [
        (location.under(f" (entry {i})"), each) for i, each in enumerate(entries) if not isinstance(each, PLAIN_TYPES)
    ]
    token = ("set", len(value), hash(plain))
    if isinstance(value, frozenset):
        return SeenValue(token, children)
    saved = set(value)

    def restore() -> None:
        if value != saved:
            value.clear()
            value.update(saved)

    return SeenValue(token, children, restore)


def _array(location: ValueLocation, value: np.ndarray) -> SeenValue:
    token = ("array", value.shape, str(value.dtype))
    if value.nbytes > MAX_BYTES or value.dtype.hasobject:
        return SeenValue(token)
    saved = value.copy()

    def restore() -> None:
        if value.flags.writeable:
            value[...] = saved

    return SeenValue((*token, hashlib.sha256(saved.tobytes()).hexdigest()), (), restore)


def _function(location: ValueLocation, value: types.FunctionType) -> SeenValue:
    where = ValueLocation(f"function {value.__qualname__}")
    children: list[tuple[ValueLocation, Any]] = []
    cells = []
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
        with contextlib.suppress(ValueError):  # not filled yet
            children.append((where.under(repr(name)), cell.cell_contents))
            cells.append((cell, _copy_count(cell.cell_contents)))
    defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), value.__dict__]
    children += [(where.under(f"'default {i}'"), each) for i, each in enumerate(defaults)]
    used = set(_names(value.__code__))
    children += _named_in(value.__module__, value.__globals__, used, set())
    saved = {name: value.__globals__[name] for name in used if name in value.__globals__}

    def restore() -> None:
        for cell, each in cells:
            if not _is_same(cell.cell_contents, each):
                cell.cell_contents = each
        value.__globals__.update(saved)

    borrowed = [(functools.partial(setattr, cell, "cell_contents"), each) for cell, each in cells]
    return SeenValue("function", children, restore, [*borrowed, *_entries_of(value.__globals__, saved)])


def _named_in(
    file: str, namespace: Mapping[str, Any], used: set[str], visited: set[str]
) -> Iterator[tuple[ValueLocation, Any]]:
    """Yield the values that code using these names may reach in a file, and in files named there."""
    visited.add(file)
    for name in sorted(used & namespace.keys()):
        value = namespace[name]
        if not isinstance(value, types.ModuleType):
            yield ValueLocation(FILE_PREFIX + file, repr(name)), value
        elif value.__name__ not in visited and value.__name__.split(".")[0] not in SKIPPED_PACKAGES:
            yield from _named_in(value.__name__, vars(value), used, visited)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _class(location: ValueLocation, value: type) -> SeenValue:
    location = ValueLocation(f"class {value.__name__}")
    held = {name: each for name, each in vars(value).items() if not name.startswith("__")}
    children = [(location.under(repr(name)), each) for name, each in held.items()]

    def restore() -> None:
        for name, each in held.items():
            if vars(value).get(name) is not each:
                type.__setattr__(value, name, each)

    return SeenValue("class", children, restore)


def _wrapped(location: ValueLocation, value: Any) -> SeenValue:
    names = ("__self__", "__func__", "func", "args", "keywords", "fget", "__wrapped__")
    return SeenValue(
        type(value).__name__, [(location, getattr(value, n)) for n in names if getattr(value, n, None) is not None]
    )


def _is_bound(value: Any) -> bool:
    """Return True for a method of a C object, such as `iterator.__next__`, except of a random generator."""
    if not isinstance(value, types.MethodWrapperType | types.BuiltinMethodType):
        return False
    return not isinstance(
        value.__self__, types.ModuleType | type | random.Random | np.random.RandomState | np.random.Generator
    )


def _is(kinds: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


INSPECTORS: tuple[tuple[Callable[[Any], bool], Callable[[ValueLocation, Any], SeenValue]], ...] = (
    (_is(tuple(GENERATORS)), inspect_generator),
    (_is(dict), _dict),
    (_is((list, tuple, collections.deque)), _sequence),
    (_is((set, frozenset)), _set),
    (_is(np.ndarray), _array),
    (_is((bytearray, array.array, memoryview, mmap.mmap, ctypes.c_int.__mro__[-2])), inspect_memory),
    (_is(contextvars.ContextVar), inspect_context_variable),
    (_is(weakref.ReferenceType), inspect_reference),
    (_is(types.FunctionType), _function),
    (_is(type), _class),
    (_is((types.MethodType, functools.partial, staticmethod, classmethod, property)), _wrapped),
    (is_iterator, inspect_iterator),
    (_is_bound, _wrapped),
    (_is(itertools.count), lambda location, value: SeenValue(("count", repr(value)))),
)
