"""Imports of optional libraries, when an adapter is used."""

import importlib
from types import ModuleType

from ..core.errors import RecipeError
from ..core.install_hints import install_command


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a module that `panax-jax[extra]` installs.

    Raises:
        RecipeError: The module can't be imported; the message has the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RecipeError(
            f"this adapter needs {module}, which can't be imported ({error}); run: {install_command(extra)}"
        ) from error
