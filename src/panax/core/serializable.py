"""Registry of the classes that a file may name: a checkpoint's description is built from these and no others.

A class registers itself. Panax registers its classes by the module that defines each, which is imported when
a file names the class.
"""

import dataclasses
import importlib
import re
from typing import TypeVar

_Class = TypeVar("_Class")

_classes: dict[str, type | str] = {}

_RENAMED = {
    "Filtered": "FilteredCorpus",
    "Hashed": "HashBuckets",
    "Joined": "ConcatCorpus",
    "Keys": "HashedIds",
    "Numbered": "IntegerIds",
    "OwnSchedule": "CustomSchedule",
    "Part": "MixtureComponent",
    "Vocabulary": "CountVocabulary",
}
"""Present names of classes, by their names in files of version 0.1.1: settings name them, and fingerprints of
data hash the names."""

_FORMER = {new: old for old, new in _RENAMED.items()}
_ANY_RENAMED = re.compile(r"\b(?:" + "|".join(_FORMER) + r")\b(?=\(|$)")


def register_serializable(cls: type[_Class]) -> type[_Class]:
    """Register a dataclass, such as a task or a setting in one, so that files can describe it. Works as a
    decorator.

    Only its fields are read from the file, so its `__post_init__` should validate them.

    Raises:
        TypeError: It is not a dataclass.
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


def current_name(name: str) -> str:
    """Return the present name of a class that a file names.

    >>> current_name("Part"), current_name("TextData")
    ('MixtureComponent', 'TextData')
    """
    return _RENAMED.get(name, name)


def former_names(text: str) -> str:
    """Return a class's name or a repr with the names that fingerprints hash, which a rename must not change.

    >>> former_names("ConcatCorpus"), former_names("Bag(column='id', ids=IntegerIds(rows=4))")
    ('Joined', "Bag(column='id', ids=Numbered(rows=4))")
    """
    return _ANY_RENAMED.sub(lambda match: _FORMER[match.group()], text)


def serializable_names() -> list[str]:
    """Return all registered names."""
    return list(_classes)
