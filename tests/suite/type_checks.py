"""Shapes and types of arrays are checked in tests, in every call of a module that writes them down.

Pyright checks all other types. To check them here too, in each of hundreds of thousands of calls of functions that see no array,
took a ninth of the suite's time, and half of a test's that counts what a step sends.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""Checks the arguments and results of a function; an int is a float, as type checkers have it."""


def modules_of_arrays(package: str) -> Iterator[str]:
    """Modules of a package that name shapes of arrays."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    for root in map(Path, spec.submodule_search_locations):
        for path in sorted(root.rglob("*.py")):
            if path.name != "__init__.py" and "jaxtyping" in path.read_text(encoding="utf-8"):
                yield ".".join((package, *path.relative_to(root).with_suffix("").parts))


def check_types(packages: Sequence[str]) -> None:
    """Before anything of these packages is imported."""
    modules = [name for package in packages for name in modules_of_arrays(package)]
    install_import_hook(modules, f"{__name__}.checked")
