"""All known families, from each module in this package with a name that begins with `families_`."""

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path

from .family import Family


def _families() -> Mapping[str, Family]:
    modules = sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    found = [importlib.import_module(f".{name}", __package__) for name in modules if name.startswith("families_")]
    return {family.model_type: family for module in found for family in module.FAMILIES}


FAMILIES: Mapping[str, Family] = _families()
"""Families by `model_type`."""
