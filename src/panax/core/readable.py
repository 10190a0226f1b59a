"""The classes that a file may name: what a checkpoint's description is built from, and nothing else is.

A class registers itself. Panax registers its own by the module that defines each, which is imported when a file names it.
"""

import dataclasses
import importlib
from typing import TypeVar

_Class = TypeVar("_Class")

_classes: dict[str, type | str] = {}


def register_serializable(cls: type[_Class]) -> type[_Class]:
    """Let files describe this dataclass: a task, or what one holds. Works as a decorator.

    Only its fields are read from the file, so its `__post_init__` should check them.

    Raises:
        TypeError: It is not a dataclass.
        ValueError: Another class of its name is registered.

    >>> @register_serializable
    ... @dataclasses.dataclass(frozen=True)
    ... class Bottleneck:
    ...     width: int
    >>> readable("Bottleneck") is Bottleneck
    True
    """
    described = isinstance(cls, type) and dataclasses.is_dataclass(cls)
    if not described:
        raise TypeError(f"{cls!r} is not a dataclass; a file describes a class by its fields")
    known = _classes.get(cls.__name__, cls)
    # A cell of a notebook that runs again defines its class again.
    if not isinstance(known, type) or (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"a readable class {cls.__name__!r} is registered already ({known}); rename one")
    _classes[cls.__name__] = cls
    return cls


def readable_in(module: str, *names: str) -> None:
    """Let files describe dataclasses of a module that is not imported yet."""
    _classes.update(dict.fromkeys(names, module))


def readable(name: str) -> type | None:
    """The class that a file means; None where there is none of that name, and nothing is imported then."""
    found = _classes.get(name)
    if isinstance(found, str):
        found = _classes[name] = getattr(importlib.import_module(found), name)
    return found


def readable_names() -> list[str]:
    """What a file may name."""
    return list(_classes)
