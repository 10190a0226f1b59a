"""Registry of the classes that a file may name: a checkpoint's description is built from these and no others.

A class registers itself. Panax registers its classes by the module that defines each, which is imported when
a file names the class.
"""

import dataclasses
import importlib
from typing import TypeVar

_Class = TypeVar("_Class")

_classes: dict[str, type | str] = {}


def register_serializable(cls: type[_Class]) -> type[_Class]:
    """Register a dataclass, such as a task or a setting in one, so that files can describe it. Works as a
    decorator.

    Only its fields are read from the file, so its `__post_init__` should validate them.

    Raises:
        TypeError: The class is not a dataclass.
        ValueError: Another class of the same name is registered.

    >>> @register_serializable
    ... @dataclasses.dataclass(frozen=True)
    ... class Bottleneck:
    ...     width: int
    >>> find_serializable("Bottleneck") is Bottleneck
    True
    """
    described = isinstance(cls, type) and dataclasses.is_dataclass(cls)
    if not described:
        raise TypeError(f"{cls!r} is not a dataclass; a file describes a class by its fields")
    known = _classes.get(cls.__name__, cls)
    # Rerunning a notebook cell redefines its class.
    if not isinstance(known, type) or (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"a readable class {cls.__name__!r} is registered already ({known}); rename one")
    _classes[cls.__name__] = cls
    return cls


def register_serializable_module(module: str, *names: str) -> None:
    """Register dataclasses of a module that is not imported yet."""
    _classes.update(dict.fromkeys(names, module))


def find_serializable(name: str) -> type | None:
    """Return the class registered under a name, importing its module; None for an unknown name, without any
    import.
    """
    found = _classes.get(name)
    if isinstance(found, str):
        found = _classes[name] = getattr(importlib.import_module(found), name)
    return found


def serializable_names() -> list[str]:
    """Return all registered names."""
    return list(_classes)
