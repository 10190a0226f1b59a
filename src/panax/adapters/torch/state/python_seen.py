"""What the walk through Python's values makes of each: its place, what it is compared by, and whose it is."""

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
"""Packages whose functions and classes are not followed, and whose objects are not, but for those that `is_user_class` names."""

INFRASTRUCTURE_PACKAGES = frozenset({
    "_thread", "abc", "ast", "asyncio", "builtins", "codecs", "concurrent", "contextlib", "dataclasses", "enum", "importlib",
    "inspect", "io", "logging", "operator", "re", "selectors", "socket", "ssl", "subprocess", "threading", "traceback", "typing",
    "unittest", "warnings",
})  # fmt: skip
"""Packages of the standard library whose objects hold the interpreter's affairs, and no values of a model."""

STATEFUL_PREFIXES = ("torch.distributions.", "torch.optim.")
"""Parts of PyTorch whose objects hold tensors or counts of a model that made them."""

FILE_PREFIX = "the file of "
"""What the owner of a global begins with."""

MAX_ENTRIES = 10_000
"""Entries of a container that are looked at: a vocabulary or a data set is not a count."""

MAX_BYTES = 2**26
"""An array or tensor of more is not copied."""


_MODULES = re.compile(r"\._(?:parameters|buffers|modules)\['(\w+)'\]")
"""Where a module keeps what code reaches as its attribute."""


@dataclasses.dataclass(frozen=True)
class ValueLocation:
    """Where a value is.

    Attributes:
        owner: What holds it: "module layers.0", "the loss", "class Block", "module-level code of model".
        trail: Its name there, as code would write it.
    """

    owner: str
    trail: str = ""

    @property
    def display_name(self) -> str:
        """Its name, in quotes where it is a plain one."""
        quoted = re.fullmatch(r"'(\w+)'(.*)", self.trail, re.DOTALL)
        if not quoted:
            return self.trail or "itself"
        whole = _MODULES.sub(r".\1", f".{quoted[1]}{quoted[2]}").removeprefix(".")
        return f"'{whole}'"

    def under(self, part: str) -> "ValueLocation":
        return ValueLocation(self.owner, self.trail + part)


@dataclasses.dataclass
class SeenValue:
    """One value that was met: its token for comparison, what it holds, and how it is put back."""

    token: Any
    children: Iterable[tuple[ValueLocation, Any]] = ()
    restore: Callable[[], None] | None = None
    borrowed: Iterable[tuple[Callable[[Any], None], Any]] = ()


def comparison_token(value: Any) -> Any:
    """What a plain value is compared by."""
    return (type(value).__name__, repr(value))


def find_package(code: Any) -> str:
    """The package that a class, a function or an object is of."""
    return (getattr(code, "__module__", None) or "builtins").split(".")[0]


def is_user_class(cls: type) -> bool:
    """Whether objects of a class are looked into: a user's, and those of libraries in which users keep values."""
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
