"""Optional libraries of environments, imported when one of their environments is used."""

import importlib
from collections.abc import Mapping
from types import ModuleType

from ..core.errors import RecipeError
from ..core.install_hints import install_command

Setting = bool | int | float | str
"""Value of a setting of another library's environment: it is part of a run's settings, and serialized as
JSON."""

Settings = Mapping[str, Setting] | tuple[tuple[str, Setting], ...]


def sorted_pairs(settings: Settings) -> tuple[tuple[str, Setting], ...]:
    """Sort names with their values by name, in a form that can be compared, hashed, and read back from a
    file."""
    return tuple(sorted(dict(settings).items()))


def import_library(module: str, extra: str, remark: str = "") -> ModuleType:
    """Import a module that `panax-jax[extra]` installs.

    Args:
        remark: Additional remark, as part of a sentence.

    Raises:
        RecipeError: The module can't be imported; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RecipeError(
            f"this environment needs {module}, which can't be imported ({error}); run: {install_command(extra)}{remark}"
        ) from error
