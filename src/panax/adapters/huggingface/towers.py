"""Models of several towers, such as vision and text: their text tower's settings and tensors. The other towers are not
loaded, and are copied to the export unchanged."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .family import Family

TEXT_CONFIG = "text_config"
"""Key of the text tower's settings."""

TOWER_CONFIGS = ("vision_config", "audio_config")
"""Keys of other towers' settings."""

IGNORED = {"gemma3": ("final_logit_softcapping",)}
"""Settings of the text tower that `transformers` does not compute in the whole model, by its `model_type`."""

TIED = "tie_word_embeddings"

STARTS = ("language_model.", "model.language_model.")
"""Beginnings of the names of the text tower's tensors, if they don't have the family's own names."""


def has_towers(raw: Mapping[str, Any]) -> bool:
    """Return True if a config.json is of a model with other towers in addition to the text's."""
    return isinstance(raw.get(TEXT_CONFIG), Mapping) or any(isinstance(raw.get(key), Mapping) for key in TOWER_CONFIGS)


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text tower's settings; older releases have them at the top level, next to the other towers'."""
    inner = raw.get(TEXT_CONFIG)
    if not isinstance(inner, Mapping):
        return dict(raw)
    # The embedding belongs to the whole model, and so does the form of the weights: keys outside count.
    return {**inner, **{key: raw[key] for key in (TIED, "quantization_config") if key in raw}}


class TowerNames(NamedTuple):
    """Names of the text tower's tensors in the files of the whole model.

    Attributes:
        start: Beginning of the names, before or in place of the family's prefix.
        prefix: The family's prefix, and the name of its head.
    """

    start: str
    prefix: str
    head: str

    @classmethod
    def of(cls, family: Family, names: Iterable[str]) -> "TowerNames":
        """Find the naming layout that the files use."""
        names = list(names)
        start = next((start for start in STARTS if any(name.startswith(start) for name in names)), "")
        return cls(start, family.prefix, family.head)

    def inner(self, name: str) -> str | None:
        """Return the family's name of a tensor in the files; None if it is another tower's.

        >>> names = TowerNames("language_model.", "model.", "lm_head.weight")
        >>> names.inner("language_model.model.norm.weight"), names.inner("vision_tower.ln.weight")
        ('model.norm.weight', None)
        >>> TowerNames("model.language_model.", "model.", "lm_head.weight").inner("model.language_model.norm.weight")
        'model.norm.weight'
        """
        if name == self.head:
            return name
        if not name.startswith(self.start or self.prefix):
            return None
        rest = name.removeprefix(self.start)
        return self.prefix + rest if self.start.startswith(self.prefix) else rest

    def outer(self, name: str) -> str:
        """Return the name in the files of a tensor of the family."""
        if self.start.startswith(self.prefix):
            return name if name == self.head else self.start + name.removeprefix(self.prefix)
        return self.start + name


def whole_config(like: Mapping[str, Any], text: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the config.json of the whole model, with new settings of its text tower.

    Args:
        like: The release's config.json.
    """
    config = {key: value for key, value in like.items() if key not in ("torch_dtype", "dtype", "quantization_config")}
    if isinstance(like.get(TEXT_CONFIG), Mapping):
        architecture = (
            {"architectures": like[TEXT_CONFIG]["architectures"]} if "architectures" in like[TEXT_CONFIG] else {}
        )
        inner = {key: value for key, value in text.items() if key != "architectures"} | architecture
        config |= {TEXT_CONFIG: inner, TIED: text[TIED]} if TIED in text else {TEXT_CONFIG: inner}
    else:
        config |= {key: value for key, value in text.items() if key != "architectures"}
    return config | {"torch_dtype": dtype}
