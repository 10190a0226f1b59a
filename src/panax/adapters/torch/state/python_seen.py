"""Results of the walk through Python's values: location, token for comparison, and owner of each."""

import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

PLAIN_TYPES = (
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
    decimal.Decimal,
    fractions.Fraction,
    range,
    slice,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    uuid.UUID,
    pathlib.PurePath,
)
SKIPPED_PACKAGES = sys.stdlib_module_names | {
    "torch",
    "numpy",
    "jax",
    "jaxlib",
    "panax",
    "lightning",
    "pytorch_lightning",
}
"""Packages with functions, classes and objects that are not followed, unless `is_user_class` accepts them."""

INFRASTRUCTURE_PACKAGES = frozenset({
    "_thread", "abc", "ast", "asyncio", "builtins", "codecs", "concurrent", "contextlib", "dataclasses", "enum", "importlib",
    "inspect", "io", "logging", "operator", "re", "selectors", "socket", "ssl", "subprocess", "threading", "traceback", "typing",
    "unittest", "warnings",
})  # fmt: skip
"""Packages of the standard library with objects that hold internals, and no values of a model."""

STATEFUL_PREFIXES = ("torch.distributions.", "torch.optim.")
"""Parts of PyTorch with objects that hold tensors or counts of a model that created them."""

FILE_PREFIX = "the file of "
"""Prefix of the owner of a global."""

MAX_ENTRIES = 10_000
"""Maximum number of inspected entries of a container: a vocabulary or a data set is not a count."""

MAX_BYTES = 2**26
"""Size above which an array or tensor is not copied, in bytes."""


_MODULES = re.compile(r"\._(?:parameters|buffers|modules)\['(\w+)'\]")
"""Location in a module of values that code reaches as its attributes."""


@dataclasses.dataclass(frozen=True)
class ValueLocation:
    """Location of a value.

    Attributes:
        owner: Its holder: "module layers.0", "the loss", "class Block", "module-level code of model".
        trail: Name of the value within its owner, as code would write it.
    """

    owner: str
    trail: str = ""

    @property
    def display_name(self) -> str:
        """Return the value's name, in quotes if it is a plain name."""
        quoted = re.fullmatch(r"'(\w+)'(.*)", self.trail, re.DOTALL)
        if not quoted:
            return self.trail or "itself"
        whole = _MODULES.sub(r".\1", f".{quoted[1]}{quoted[2]}").removeprefix(".")
        return f"'{whole}'"

    def under(self, part: str) -> "ValueLocation":
        return ValueLocation(self.owner, self.trail + part)


@dataclasses.dataclass
class SeenValue:
    """One inspected value: its token for comparison, its contents, and the function that restores it."""

    token: Any
    children: Iterable[tuple[ValueLocation, Any]] = ()
    restore: Callable[[], None] | None = None
    borrowed: Iterable[tuple[Callable[[Any], None], Any]] = ()


def comparison_token(value: Any) -> Any:
    """Return the token by which a plain value is compared."""
    return (type(value).__name__, repr(value))


def find_package(code: Any) -> str:
    """Return the package of a class, a function or an object."""
    return (getattr(code, "__module__", None) or "builtins").split(".")[0]


def is_user_class(cls: type) -> bool:
    """Return True if objects of a class are inspected: the user's classes, and those of libraries in which users
    store values."""
    package, module = find_package(cls), (getattr(cls, "__module__", None) or "") + "."
    if module.startswith(STATEFUL_PREFIXES):
        return True
    if cls is threading.local:
        return True
    if package == "multiprocessing":
        return module.startswith(("multiprocessing.sharedctypes.", "multiprocessing.shared_memory."))
    return package not in SKIPPED_PACKAGES or (
        package in sys.stdlib_module_names and package not in INFRASTRUCTURE_PACKAGES
    )
