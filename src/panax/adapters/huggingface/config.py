"""config.json read as a `DecoderConfig` or a `VitConfig`."""

import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import CheckpointError, RecipeError, describe_type
from ...layers import Latent, Rotary
from ...layers.moe.moe_config import MoE
from ...models import DecoderConfig, VitConfig
from ...system import json_reader
from .families import FAMILIES
from .family import ACTIVATIONS, Family
from .gguf import find_gguf, open_gguf, read_config_json
from .json_values import flatten_keys, is_json
from .nearest import describe_nearest
from .nested_config import read_latent, read_mixture
from .quantized import check_quantization
from .rotary_positions import read_rotaries
from .towers import IGNORED, has_towers, text_config
from .vision import VIT, read_vit

CONFIG = "config.json"

_MOST_LAYERS = 10_000


def config_from(directory: str | Path) -> DecoderConfig | VitConfig:
    """Read the configuration of the decoder, or the vision transformer, in a folder in Hugging Face's layout.

    The configuration does not include dropout, which is 0 regardless of the release's training.

    Args:
        directory: A folder with a config.json; nothing is downloaded.

    Raises:
        CheckpointError: The folder or its config.json is missing or is not JSON.
        RecipeError: The model is of another family, or has a part that ours lacks; names the key and its
            value.
    """
    return read_config(Path(directory))[1]


def read_config(folder: Path) -> tuple[Family, DecoderConfig | VitConfig]:
    """Return the family of the model in a folder, and its configuration."""
    raw = read_json(folder)
    if has_towers(raw):
        model_type, raw = str(raw.get("model_type")), text_config(raw)
        for key in IGNORED.get(model_type, ()):
            if raw.get(key) is not None:
                raise RecipeError(
                    f"{folder / CONFIG}: {key}={raw[key]!r} is in the text's settings, and `transformers` does not compute it in "
                    f"a {model_type} model; remove it"
                )
    family = _family_of(raw, folder / CONFIG)
    try:
        if family is VIT:
            return family, read_vit(raw, folder, folder / CONFIG)
        return family, _decoder_config(_Reader(family, raw, folder / CONFIG))
    except (OverflowError, ZeroDivisionError) as error:
        raise RecipeError(f"{folder / CONFIG} holds a number that can't be: {error}") from error


def read_decoder(raw: Mapping[str, Any], where: Path) -> DecoderConfig:
    """Return the configuration of a decoder from the content of its config.json."""
    return _decoder_config(_Reader(_family_of(raw, where), raw, where))


def read_json(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; expected one with {CONFIG} and model.safetensors. Nothing is downloaded here: "
            f"fetch a published model with `hf download ORGANIZATION/MODEL --local-dir FOLDER`"
        )
    if (packed := find_gguf(folder)) is not None:
        with open_gguf(packed) as file:
            return read_config_json(file, packed)
    try:
        raw = json_reader.read(folder / CONFIG, constants=True)
    except (OSError, ValueError) as error:
        reason = "it is missing" if isinstance(error, FileNotFoundError) else str(error)
        raise CheckpointError(
            f"{folder / CONFIG} can't be read: {reason}; expected a folder with {CONFIG} and model.safetensors"
        ) from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{folder / CONFIG} holds {describe_type(raw)}; expected an object")
    return raw


def _family_of(raw: Mapping[str, Any], where: Path) -> Family:
    """Return the family that config.json names by `model_type`, or by `architectures` without one."""
    model_type, architectures = raw.get("model_type"), raw.get("architectures") or []
    if not isinstance(architectures, list):
        raise RecipeError(f"{where}: architectures={architectures!r}; expected a list of names")
    families = {**FAMILIES, VIT.model_type: VIT}
    for family in families.values():
        if model_type in (family.model_type, *family.also) or (
            model_type is None and family.architecture in architectures
        ):
            return family
    raise RecipeError(
        f"{where}: no family here has model_type={model_type!r}, architectures={architectures!r}. "
        f"{describe_nearest(raw, FAMILIES)}"
    )


class _Reader:
    """Reader of one config.json, key by key."""

    def __init__(self, family: Family, raw: Mapping[str, Any], where: Path):
        self.family, self.raw, self.where = family, flatten_keys(raw, family.nested), where
        if family.complete is not None:
            self.raw = dict(family.complete(self.raw, self.refuse))

    def refuse(self, key: str, why: str) -> typing.NoReturn:
        raise RecipeError(f"{self.where}: {key}={self.raw.get(key)!r} in a {self.family.model_type} model; {why}")

    def field(self, field: str, key: str) -> Any:
        """Read a field of `DecoderConfig`; 0 if the family derives it from others."""
        if key not in self.raw and key not in self.family.absent:
            raise RecipeError(f"{self.where} has no {key}, which a {self.family.model_type} model can't do without")
        value = self.raw.get(key, self.family.absent.get(key))
        if field == "activation":
            if not isinstance(value, str) or value not in ACTIVATIONS:
                self.refuse(key, f"expected one of {', '.join(ACTIVATIONS)}")
            return ACTIVATIONS[value]
        kind = typing.get_type_hints(self.family.config)[field]
        optional = isinstance(kind, types.UnionType)
        if value is None and optional:
            return None
        if value is None and self.family.absent.get(key, 0) is None:
            return 0
        expected_type = typing.get_args(kind)[0] if optional else kind
        if not is_json(value, expected_type):
            self.refuse(key, f"expected a value of type {expected_type.__name__}")
        return expected_type(value)


def _decoder_config(read: _Reader) -> DecoderConfig:
    family = read.family
    check_quantization(read.raw, read.refuse)
    for key, values in family.only.items():
        if read.raw.get(key, values[0]) not in values:
            read.refuse(key, f"the decoder computes {key}={values[0]!r} only")
    fields: dict[str, Any] = dict(family.always)
    for field, key in family.keys.items():
        fields[field] = read.field(field, key)
    embed, heads = fields["embed"], fields["heads"]
    if "ffn" in family.keys:
        fields["ffn"] = fields["ffn"] or 4 * embed
    if "kv_heads" in family.keys:
        fields["kv_heads"] = fields["kv_heads"] or heads
    if "head_dim" in family.keys and heads > 0:
        fields["head_dim"] = fields["head_dim"] or embed // heads
    fields |= _layer_fields(read, fields)
    latent = read_latent(read.raw, read.refuse) if family.latent else None
    moe = read_mixture(family.mixture, read.raw, fields["num_layers"], read.refuse) if family.mixture else None
    try:
        fields |= {} if latent is None else {"latent": Latent(**latent)}
        fields |= {} if moe is None else {"feed_forward": MoE(**moe)}
        family_fields = {} if family.read is None else family.read(read.raw, read.refuse)
        return family.config(**fields | family_fields)
    except RecipeError as error:
        raise RecipeError(f"{read.where}: {error}") from error


def _layer_fields(read: _Reader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that may differ between layers."""
    family, num_layers = read.family, fields["num_layers"]
    if num_layers > _MOST_LAYERS:
        read.refuse(family.keys["num_layers"], f"expected at most {_MOST_LAYERS} layers")
    windows = family.windows.read(read.raw, num_layers, read.refuse)
    fields_of_layers: dict[str, Any] = {"windows": _shortest_cycle(windows, 0)}
    if family.rotary is not None:
        length = fields.get("max_length", 0)
        rotaries = read_rotaries(family.rotary, read.raw, length, windows, read.refuse)
        first, *others = cycle = _shortest_cycle(rotaries, Rotary())
        fields_of_layers |= {"rotaries": cycle} if others or first is None else {"rotary": first}
        limits = {rotary.scaling.max_positions for rotary in cycle if rotary is not None and rotary.scaling is not None}
        fields_of_layers |= {"max_length": min([length, *limits - {None}])} if limits - {None} else {}
    return fields_of_layers


def _shortest_cycle(values: tuple[Any, ...], default: Any) -> tuple[Any, ...]:
    """Return the shortest cycle that gives these values when repeated; without values, a cycle of the default."""
    for length in range(1, len(values) + 1):
        if all(x == values[i % length] for i, x in enumerate(values)):
            return values[:length]
    return (default,)
