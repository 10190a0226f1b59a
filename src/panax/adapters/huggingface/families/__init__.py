"""All known families, a module for each lineage. A new one is a module here and a line in `_LINEAGES`."""

import importlib
from collections.abc import Mapping

from ....core.errors import RecipeError
from ..family import Family

_LINEAGES = (
    "gpt", "llama", "qwen", "gemma", "mistral", "deepseek", "dbrx", "mamba", "glm", "phi", "olmo", "granite", "cohere",
    "exaone", "smollm", "hunyuan", "ernie", "neox", "minimax", "early.falcon", "early.opt", "early.alibi",
    "hybrid.lfm", "hybrid.llama4", "hybrid.nemotron_h", "hybrid.falcon_h1",
)  # fmt: skip
"""In the order in which a configuration that several families express is written."""


def _families() -> Mapping[str, Family]:
    modules = [importlib.import_module(f".{name}", __package__) for name in _LINEAGES]
    return {family.model_type: family for module in modules for family in module.FAMILIES}


BUILT_IN: Mapping[str, Family] = _families()
"""The families of this package, by `model_type`."""

FAMILIES: dict[str, Family] = dict(BUILT_IN)
"""These, and those that were registered."""


def register_family(family: Family) -> None:
    """Add a family from outside of this package: its folders load, and its configurations are exported.

    Raises:
        RecipeError: Another family has this `model_type`.
    """
    known = next((each for each in FAMILIES.values() if family.model_type in (each.model_type, *each.also)), family)
    if known != family:
        raise RecipeError(f"a family of model_type={family.model_type!r} is registered already; choose another name")
    FAMILIES[family.model_type] = family
