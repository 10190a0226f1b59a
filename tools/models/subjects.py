"""What a page is about: a family of Hugging Face's, the vision transformers, or models that were described but not released."""

import dataclasses
from collections.abc import Mapping

from panax.adapters.huggingface.families import BUILT_IN
from panax.adapters.huggingface.family import Family
from panax.adapters.huggingface.family_choice import to_config_json
from panax.adapters.huggingface.vision import VIT
from panax.models import PRESETS, VIT_PRESETS
from panax.models.presets.decoders import UNRELEASED_PRESETS


@dataclasses.dataclass(frozen=True)
class Subject:
    """One page.

    Attributes:
        name: File name without its ending.
        presets: Names of the published models on the page.
        family: Declared reading of Hugging Face's files; None if there are no such files, or if they are of images.
        loads: True if released weights load.
    """

    name: str
    title: str
    presets: tuple[str, ...]
    family: Family | None = None
    loads: bool = True


def subjects() -> list[Subject]:
    """Return all pages: each family with the presets that it expresses, then the others."""
    by_family: dict[str, list[str]] = {name: [] for name in BUILT_IN}
    for preset, config in PRESETS.items():
        if preset not in UNRELEASED_PRESETS:
            by_family[to_config_json(config, None)[0].model_type].append(preset)
    pages = [Subject(name, BUILT_IN[name].title, tuple(presets), BUILT_IN[name]) for name, presets in by_family.items()]
    pages.append(Subject(VIT.model_type, VIT.title, tuple(VIT_PRESETS)))
    pages.append(
        Subject("unreleased", "Models without released weights", tuple(sorted(UNRELEASED_PRESETS)), loads=False)
    )
    return pages


def supported_values(family: Family) -> Mapping[str, tuple[object, ...]]:
    """Return the keys of config.json that change the computation, with the values that load."""
    return dict(sorted(family.only.items()))
