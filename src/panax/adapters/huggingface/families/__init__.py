"""All known families, a module for each lineage. A new one is a module here and a line in `_LINEAGES`."""

import importlib
from collections.abc import Mapping

from ..family import Family

_LINEAGES = (
    "gpt", "llama", "qwen", "gemma", "mistral", "deepseek", "dbrx", "mamba", "glm", "phi", "olmo", "granite", "cohere",
    "exaone", "smollm", "hunyuan", "ernie", "neox", "minimax",
)  # fmt: skip
"""In the order in which a configuration that several families express is written."""


def _families() -> Mapping[str, Family]:
    modules = [importlib.import_module(f".{name}", __package__) for name in _LINEAGES]
    return {family.model_type: family for module in modules for family in module.FAMILIES}


FAMILIES: Mapping[str, Family] = _families()
"""Families by `model_type`."""
