"""Libraries of environments that only some users have, imported when an environment of theirs is used."""

import importlib
from collections.abc import Mapping
from types import ModuleType

from ..core.errors import RecipeError
from ..core.install_hints import install_command

Setting = bool | int | float | str
"""What an environment of another library may be given: it is part of a run's settings, and travels as JSON."""

Settings = Mapping[str, Setting] | tuple[tuple[str, Setting], ...]


def sorted_pairs(settings: Settings) -> tuple[tuple[str, Setting], ...]:
    """Names with their values, in the order of names: values that are compared, hashed, and read back from a file."""
    return tuple(sorted(dict(settings).items()))


def import_library(module: str, extra: str, remark: str = "") -> ModuleType:
    """Import a module that `panax-jax[extra]` installs.

    Args:
        remark: What else to know, as a sentence's part.

    Raises:
        RecipeError: It can't be imported; with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RecipeError(
            f"this environment needs {module}, which can't be imported ({error}); run: {install_command(extra)}{remark}"
        ) from error
