"""Comparison of configurations, and choice of a family that can express a `DecoderConfig` as config.json."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ...core.errors import RecipeError, describe_type, suggest_name
from ...models import DecoderConfig
from .families import FAMILIES
from .family import ACTIVATIONS, Family
from .json_values import unflatten_keys
from .nearest import known_keys
from .nested_config import TRAINING_ONLY, complete_moe_fields, write_latent, write_mixture
from .rotary_positions import ROTARY_KEYS, Rotaries, read_rotaries, write_rotaries

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


_WRITTEN_ANEW = {"torch_dtype", "dtype", "quantization_config", "transformers_version", *TOKEN_IDS}
"""Keys that are not taken over from the release."""


def resolve_defaults(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields that define a configuration's computation, with defaults and alternatives
    resolved."""
    fields = dict(vars(config))
    cycle = config.windows
    fields["windows"] = tuple(cycle[i % len(cycle)] for i in range(config.num_layers))
    rotaries = layer_rotaries(config)
    fields["rotary"] = rotaries[0] if len(set(rotaries)) == 1 else rotaries
    del fields["rotaries"]
    fields["kv_heads"], fields["head_dim"] = config.num_kv_heads, config.head_size
    fields["query_scale"] = float(config.query_scale or config.head_size)
    del fields["vocab_multiple"]
    if config.feed_forward is not None:
        mixture = {name: value for name, value in complete_moe_fields(config).items() if name not in TRAINING_ONLY}
        del mixture["every"], mixture["first_dense"]
        fields["feed_forward"] = "a mixture"
        fields |= {f"feed_forward.{name}": value for name, value in mixture.items()}
        fields["feed_forward.layers"] = config.mixture_layers
    return fields


def layer_rotaries(config: DecoderConfig) -> Rotaries:
    """Return each layer's rotary positions."""
    cycle = config.rotaries or (config.rotary,)
    return tuple(cycle[i % len(cycle)] for i in range(config.num_layers))


def check_same(theirs: DecoderConfig, ours: DecoderConfig, folder: Path) -> None:
    """Raise a RecipeError that names each field in which the two configurations compute something else.

    Dropout may differ, settings of a mixture that concern training alone, and, without learned positions, the
    maximum length.
    """
    free = {"dropout"} if theirs.learned_positions else {"dropout", "max_length"}
    there, here = resolve_defaults(theirs), resolve_defaults(ours)
    different = [
        f"{name} is {there[name]!r} there, {here[name]!r} here"
        for name in there
        if name not in free and name in here and there[name] != here[name]
    ]
    if different:
        raise RecipeError(
            f"the model in {folder} is not the task's: {'; '.join(different)}. Set task.model to match, or take it "
            f"from panax.adapters.huggingface.config_from"
        )


def to_config_json(config: DecoderConfig, model_type: str | None) -> tuple[Family, dict[str, Any]]:
    """Return the family that can express a configuration, and its config.json.

    Raises:
        RecipeError: No family can, or `model_type` can't; the message names the fields that prevent it.
    """
    if model_type is not None and model_type not in FAMILIES:
        raise RecipeError(f"model_type={model_type!r} is unknown; {suggest_name(model_type, FAMILIES)}")
    candidates = FAMILIES.values() if model_type is None else [FAMILIES[model_type]]
    candidates = [family for family in candidates if family.config is type(config)]
    if not candidates:
        raise RecipeError(
            f"no {model_type or 'family'} of Hugging Face's that is known here expresses {describe_type(config)}"
        )
    attempts = [(family, *_written(family, config)) for family in candidates]
    mixed = config.feed_forward is not None
    family, raw, problems = min(
        attempts,
        key=lambda attempt: (
            bool(attempt[2]),
            mixed != (attempt[0].mixture is not None),
            not attempt[0].preferred,
            len(attempt[2]),
        ),
    )
    if problems:
        who = "no family of Hugging Face's that is known here" if model_type is None else f"no {model_type} model"
        near = f" The nearest is {family.model_type}:" if model_type is None else ""
        raise RecipeError(f"{who} can express this decoder.{near} {'; '.join(problems)}")
    return family, raw


def to_config_json_like(
    config: DecoderConfig, model_type: str | None, like: Mapping[str, Any]
) -> tuple[Family, dict[str, Any]]:
    """Return the result of `to_config_json` in the family of another config.json, if that family can express the configuration,
    with the keys of that file that the family does not read.

    Raises:
        RecipeError: As `to_config_json`.
    """
    family, raw = None, {}
    released = next(
        (each for each in FAMILIES.values() if like.get("model_type") in (each.model_type, *each.also)), None
    )
    if model_type is None and released is not None:
        with contextlib.suppress(RecipeError):
            family, raw = to_config_json(config, released.model_type)
    if family is None:
        family, raw = to_config_json(config, model_type)
    if family is not released:
        return family, raw
    unread_keys = {key: value for key, value in like.items() if key not in known_keys(family) | _WRITTEN_ANEW}
    names = {"model_type": like["model_type"], "architectures": like.get("architectures") or raw["architectures"]}
    if family.rotary is not None and _reads_as(family, like, config):
        # In whichever place and form the release has them, with what text does not need.
        raw = {key: value for key, value in raw.items() if key not in ROTARY_KEYS}
        unread_keys |= {key: like[key] for key in ROTARY_KEYS if key in like}
    return family, unread_keys | raw | names


def _reads_as(family: Family, raw: Mapping[str, Any], config: DecoderConfig) -> bool:
    """Return True if the rotary positions of a config.json are those of a configuration."""

    def refuse(key: str, why: str) -> NoReturn:
        raise RecipeError(f"{key}: {why}")

    assert family.rotary is not None
    try:
        completed = raw if family.complete is None else family.complete(raw, refuse)
        windows = resolve_defaults(config)["windows"]
        return read_rotaries(family.rotary, completed, config.max_length, windows, refuse) == layer_rotaries(config)
    except RecipeError:
        return False


def _written(family: Family, config: DecoderConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the family's config.json, and why it can't express the model, a line for each reason."""
    fields = resolve_defaults(config)
    raw: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    derived = {
        "kv_heads": fields["heads"],
        "head_dim": config.head_size if family.latent else config.embed // config.heads,
        "query_scale": float(config.head_size),
    }
    expected = {name: value for name, value in derived.items() if name not in (*family.keys, *family.computed)} | dict(
        family.always
    )
    problems = [
        f"model.{name}={fields[name]!r}, expected {value!r}"
        for name, value in expected.items()
        if fields[name] != value
    ]
    if family.whole_heads and config.embed % config.heads:
        problems.append(f"model.embed={config.embed}, expected a multiple of heads={config.heads}")
    # The first of several names is the one that is written, unless the family has its own.
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())} | dict(family.activation_names)
    fields["activation"] = names[config.activation]
    if "query_scale" in family.keys:
        if not float(fields["query_scale"]).is_integer():
            problems.append(f"model.query_scale={fields['query_scale']}, expected a whole number")
        fields["query_scale"] = int(fields["query_scale"])
    for field, key in family.keys.items():
        if raw.setdefault(key, fields[field]) != fields[field]:
            problems.append(f"model.{field}={fields[field]!r}, but other fields require {key}={raw[key]!r}")
    problems += [f"model.{name}=None, expected a number" for name in family.needed if fields[name] is None]
    parts = [family.windows.write(fields["windows"])]
    if family.rotary is not None and config.learned_positions:
        problems.append("model.rotary=None, expected rotary positions")
    elif family.rotary is not None:
        parts.append(write_rotaries(family.rotary, layer_rotaries(config), fields["windows"]))
    if family.mixture is not None:
        parts.append(write_mixture(family.mixture, config))
    if family.latent:
        parts.append(write_latent(config))
    if family.write is not None:
        parts.append(family.write(config))
    for part, wrong in parts:
        raw |= part
        problems += wrong
    return unflatten_keys(raw), problems
