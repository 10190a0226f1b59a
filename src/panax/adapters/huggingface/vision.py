"""Vision transformers: config.json and preprocessor_config.json read as a `VitConfig`, and written from one.

Sources: the modeling, configuration and conversion files of `transformers` 5.23 (vit); the tensors' names
are those that every version writes into files.
"""

import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import CheckpointError, RecipeError
from ...models import VitConfig
from ...system import json_reader
from .family import ACTIVATIONS, Family, TensorSource
from .nested_config import is_json
from .pattern import Pattern

PREPROCESSOR = "preprocessor_config.json"

HEAD_WEIGHTS = "classifier."
"""Prefix of the head's tensors."""

_BILINEAR = 2
_BLOCK = {
    "attention_norm.scale": ("layernorm_before.weight", "norm"),
    "attention_norm.bias": ("layernorm_before.bias", "norm"),
    "attention.w_q": ("attention.attention.query.weight", "(heads head_dim) embed"),
    "attention.w_k": ("attention.attention.key.weight", "(kv_heads head_dim) embed"),
    "attention.w_v": ("attention.attention.value.weight", "(kv_heads head_dim) embed"),
    "attention.w_o": ("attention.output.dense.weight", "embed (heads head_dim)"),
    "attention.b_q": ("attention.attention.query.bias", "(heads head_dim)"),
    "attention.b_k": ("attention.attention.key.bias", "(kv_heads head_dim)"),
    "attention.b_v": ("attention.attention.value.bias", "(kv_heads head_dim)"),
    "attention.b_o": ("attention.output.dense.bias", "norm"),
    "feed_forward_norm.scale": ("layernorm_after.weight", "norm"),
    "feed_forward_norm.bias": ("layernorm_after.bias", "norm"),
    "feed_forward.w_up": ("intermediate.dense.weight", "ffn embed"),
    "feed_forward.b_up": ("intermediate.dense.bias", "ffn"),
    "feed_forward.w_down": ("output.dense.weight", "embed ffn"),
    "feed_forward.b_down": ("output.dense.bias", "norm"),
}
_OUTSIDE = {
    "class_token": ("vit.embeddings.cls_token", "1 1 norm"),
    "positions": ("vit.embeddings.position_embeddings", "1 position embed"),
    "patches.w": ("vit.embeddings.patch_embeddings.projection.weight", "embed channel patch_row patch_column"),
    "patches.b": ("vit.embeddings.patch_embeddings.projection.bias", "norm"),
    "final_norm.scale": ("vit.layernorm.weight", "norm"),
    "final_norm.bias": ("vit.layernorm.bias", "norm"),
    "head.w": (f"{HEAD_WEIGHTS}weight", "class embed"),
    "head.b": (f"{HEAD_WEIGHTS}bias", "class"),
}

VIT = Family(
    model_type="vit",
    title="Vision transformer",
    architecture="ViTForImageClassification",
    prefix="vit.",
    fields={"pooling": "class_token"},
    keys={
        "image_size": "image_size",
        "channels": "num_channels",
        "patch": "patch_size",
        "embed": "hidden_size",
        "num_layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "ffn": "intermediate_size",
        "activation": "hidden_act",
        "norm_epsilon": "layer_norm_eps",
        "attention_bias": "qkv_bias",
    },
    absent={
        "image_size": 224,
        "num_channels": 3,
        "patch_size": 16,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "qkv_bias": True,
    },
    only={"quantization_config": (None,)},
    weights={
        **{ours: TensorSource(name, Pattern(pattern)) for ours, (name, pattern) in _OUTSIDE.items()},
        **{
            f"layers.{ours}": TensorSource(f"vit.encoder.layer.{{layer}}.{name}", Pattern(pattern))
            for ours, (name, pattern) in _BLOCK.items()
        },
    },
    # Models without a head have this instead.
    buffers=re.compile(r"^vit\.pooler\."),
)

_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")


def read_vit(raw: Mapping[str, Any], folder: Path, where: Path) -> VitConfig:
    """Read the model that config.json describes, with the image statistics of preprocessor_config.json.

    Raises:
        RecipeError: The model has a part that `VitConfig` lacks, or a value of a wrong type.
        CheckpointError: preprocessor_config.json can't be read.
    """

    def refuse(key: str, why: str) -> typing.NoReturn:
        raise RecipeError(f"{where}: {key}={raw.get(key)!r} in a vit model; {why}")

    hints = typing.get_type_hints(VitConfig)
    fields: dict[str, Any] = dict(VIT.fields)
    for field, key in VIT.keys.items():
        value = raw.get(key, VIT.absent[key])
        if field == "activation":
            if value not in ACTIVATIONS:
                refuse(key, f"expected one of {', '.join(ACTIVATIONS)}")
            fields[field] = ACTIVATIONS[value]
        elif is_json(value, hints[field]):
            fields[field] = hints[field](value)
        else:
            refuse(key, f"expected a value of type {hints[field].__name__}")
    for key, values in VIT.only.items():
        if raw.get(key, values[0]) not in values:
            refuse(key, f"the vision transformer computes {key}={values[0]!r} only")
    labels = raw.get("id2label")
    # The default of `transformers` is two classes.
    fields["num_classes"] = len(labels) if isinstance(labels, dict) and labels else raw.get("num_labels", 2)
    fields |= _statistics(folder)
    try:
        return VitConfig(**fields)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from error


def _statistics(folder: Path) -> dict[str, tuple[float, ...]]:
    """Return mean and deviation of each channel; empty if there are none."""
    path = folder / PREPROCESSOR
    if not path.is_file():
        return {}
    try:
        raw = json_reader.read(path, constants=True)
        statistics = {ours: raw[theirs] for ours, theirs in (("mean", "image_mean"), ("std", "image_std"))}
        rescaled = abs(float(raw.get("rescale_factor", 1 / 255)) * 255 - 1) < 1e-6
        if not raw.get("do_normalize", True):
            statistics = {"mean": [0.0], "std": [1.0]}
        if not (raw.get("do_rescale", True) and rescaled):
            raise RecipeError(f"{path}: the model takes images with bytes divided by 255, and these are not")
        # Equal channels are stored as one number.
        return {
            name: tuple(map(float, values if len({*values}) > 1 else values[:1])) for name, values in statistics.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} can't be read: {error!r}; expected image_mean and image_std") from error


def check_same_vit(theirs: VitConfig, ours: VitConfig, folder: Path) -> None:
    """Raise a RecipeError that names each field in which the two differ, other than the head."""
    there, here = _effective(theirs), _effective(ours)
    if not (folder / PREPROCESSOR).is_file():
        there |= {name: here[name] for name in ("mean", "std")}
    different = [f"{name} is {there[name]!r} there, {here[name]!r} here" for name in there if there[name] != here[name]]
    if different:
        raise RecipeError(
            f"the model in {folder} is not the task's: {'; '.join(different)}. Set task.model to match, or take it "
            f"from panax.adapters.huggingface.config_from"
        )


def _effective(config: VitConfig) -> dict[str, Any]:
    fields = {name: value for name, value in vars(config).items() if name not in ("dropout", "num_classes")}
    statistics = {name: fields[name] * (config.channels // len(fields[name])) for name in ("mean", "std")}
    return fields | statistics


def vit_json(config: VitConfig, classes: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json and preprocessor_config.json, from which `read_vit` reads the same configuration.

    Args:
        classes: Class names of the labels; indices beyond them have no name.

    Raises:
        RecipeError: `transformers` has no such model.
    """
    if config.pooling != "class_token":
        raise RecipeError(
            f"no vit model of Hugging Face's can express this one: model.pooling={config.pooling!r}, expected "
            f"'class_token'"
        )
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    fields = {**vars(config), "activation": names[config.activation]}
    named = [*classes[: config.num_classes], *(f"LABEL_{number}" for number in range(len(classes), config.num_classes))]
    labels = {str(number): name for number, name in enumerate(named)}
    raw = {
        "architectures": [VIT.architecture],
        "model_type": VIT.model_type,
        **{key: fields[field] for field, key in VIT.keys.items()},
        "id2label": labels,
        "label2id": {name: int(number) for number, name in labels.items()},
        _DROPOUT[0]: config.dropout,
        _DROPOUT[1]: 0.0,
    }
    effective_fields = _effective(config)
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": config.image_size, "width": config.image_size},
        "resample": _BILINEAR,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(effective_fields["mean"]),
        "image_std": list(effective_fields["std"]),
    }
    return raw, processor
