"""Lazy imports of a package's names.

A supervisor that checks a layout, or a worker that only reads data, should neither wait for jax to be
imported nor hold a device.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from .errors import suggest_name


def lazy_getattr(package: str, where: Mapping[str, Sequence[str]], rooms: Sequence[str] = ()) -> Callable[[str], Any]:
    """Return a module-level `__getattr__` for `package`, and add its names to `dir` for completion.

    Args:
        where: Submodule to the names that it defines.
        rooms: Submodules that are attributes of the package themselves.
    """
    modules = {name: module for module, names in where.items() for name in names}

    def get(name: str) -> Any:
        if name in rooms:
            return importlib.import_module(f"{package}.{name}")
        if name not in modules:
            # Import the submodule, as `import panax.data` would have done.
            if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
                return importlib.import_module(f"{package}.{name}")
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; {suggest_name(name, {*modules, *rooms})}"
            )
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    module = sys.modules[package]
    module.__dict__["__dir__"] = lambda: sorted({*modules, *rooms, *_public(module)})
    return get


def _public(module: ModuleType) -> Iterator[str]:
    """Yield the names in `__all__`, and dunder names that Python itself looks up in a module."""
    yield from getattr(module, "__all__", ())
    yield from (name for name in module.__dict__ if name.startswith("__") and name.endswith("__"))
