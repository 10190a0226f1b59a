"""Locations of functions: as text, by which another process imports them."""

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ...core.errors import RecipeError


def split_location(where: str, setting: str = "function") -> tuple[str, str]:
    """Split the location of a function into its module or file, and its name.

    Args:
        setting: The setting that has the location, for messages.

    Raises:
        RecipeError: The text has another form.

    >>> split_location("rewards/sums.py:is_right")
    ('rewards/sums.py', 'is_right')
    """
    source, _, name = where.rpartition(":")
    is_module = all(part.isidentifier() for part in source.split("."))
    if not name.isidentifier() or not (is_module or (source.endswith(".py") and len(source) > 3)):
        raise RecipeError(f"{setting}={where!r}: expected 'module:function' or 'folder/file.py:function'")
    return source, name


def resolve_location(function: Callable[..., Any] | str, setting: str) -> str:
    """Return the location of a function, or that which is given as text after checking its form.

    Args:
        setting: As for `split_location`.

    Raises:
        RecipeError: As `split_location` and `locate_function`.
    """
    where = function if isinstance(function, str) else locate_function(function, setting)
    split_location(where, setting)
    return where


def locate_function(function: Callable[..., Any], setting: str = "function") -> str:
    """Return the location from which another process can import a function: its module if that can be found by
    name, its file otherwise.

    The path of a file is relative to the working directory if the file is inside it.

    Args:
        setting: As for `split_location`.

    Raises:
        RecipeError: It is not a function at the top level of a module or a script: a lambda, a nested function, a
            method, an object, or a function of an interactive session.

    >>> locate_function(inspect.unwrap)
    'inspect:unwrap'
    """
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if not inspect.isroutine(function) or not name.isidentifier() or module is None:
        raise RecipeError(_describe_misplaced(setting, function, "another process can't import it"))
    if getattr(module, name, None) is not function:
        raise RecipeError(
            _describe_misplaced(setting, function, f"{module.__name__}.{name} is another object, or missing")
        )
    module_name = _importable_name(module)
    if module_name is not None:
        return f"{module_name}:{name}"
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py") or not Path(file).is_file():
        raise RecipeError(_describe_misplaced(setting, function, "another process can't import an interactive session"))
    path = os.path.abspath(file)
    relative = os.path.relpath(path)
    return f"{path if relative.startswith(os.pardir) else relative}:{name}"


def _importable_name(module: ModuleType) -> str | None:
    """Return the name by which a fresh process with this `sys.path` imports the same file; None if there is none."""
    spec = getattr(module, "__spec__", None)
    # A program that `python -m` runs is called `__main__`, and its spec has its name.
    name = module.__name__ if module.__name__ != "__main__" else getattr(spec, "name", None)
    if name is None or name == "__main__":
        return None
    parent = sys.modules.get(name.rpartition(".")[0])
    path = getattr(parent, "__path__", None) if "." in name else None
    if "." in name and path is None:
        return None
    # `importlib.util.find_spec` would return the spec of the loaded module, which may come from anywhere.
    for finder in sys.meta_path:
        candidate = finder.find_spec(name, path)
        if candidate is not None:
            file = getattr(module, "__file__", None)
            same = file is None or (
                candidate.origin is not None and os.path.realpath(candidate.origin) == os.path.realpath(file)
            )
            return name if same else None
    return None


def _describe_misplaced(setting: str, function: object, reason: str) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    return (
        f"{setting}={name}: {reason}; expected a function that is defined by `def` at the top level of a module or "
        f"a script: move it there, or name it as 'module:function' or 'folder/file.py:function'"
    )
