"""Data that ships inside Python packages: the files are read in place, without importing the package."""

import importlib.util
from pathlib import Path

from panax.core.errors import DataError
from panax.core.install_hints import install_command
from panax.core.install_hints import package_install_command as command

SCHEME = "package:"


def package_file(address: str) -> Path:
    """Return the path of a file in an installed package, `package:NAME/PATH/IN/IT`.

    Raises:
        DataError: The package is not installed, or has no such file.
    """
    package, _, inside = address.removeprefix(SCHEME).partition("/")
    try:
        spec = None if "." in package or not package else importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"{address}: the package {package!r} is not installed; for a recipe's data run `"
            f"{install_command('recommenders')}`, or `{command('--no-deps', package)}`"
        )
    folder = Path(next(iter(spec.submodule_search_locations))).resolve()
    path = (folder / inside).resolve()
    if not path.is_relative_to(folder) or not path.exists():
        raise DataError(f"{address}: the package {package!r} has no {inside!r}; another version of it may have")
    return path
