"""Nested fields of `DecoderConfig`: mixture and latent, from config.json and into it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...layers.moe.moe_config import MoE
from ...models import DecoderConfig
from .family import MoEMapping
from .json_values import RefuseFn, WrittenConfig, is_json

TRAINING_ONLY = ("balance", "balance_scope", "z_loss", "jitter", "capacity", "buffer", "bias_rate")
"""Fields of `MoE` that change no logits of a model that drops no token; like dropout, not part of a
release."""

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(MoE) if field.name not in TRAINING_ONLY} | {
    "gated": True,
    "capacity": None,
}
"""Fields that a family has if its tables don't name them."""

LATENT_KEYS = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
"""Fields of `Latent`, ours to theirs."""


def read_mixture(mixture: MoEMapping, raw: Mapping[str, Any], num_layers: int, refuse: RefuseFn) -> dict[str, Any]:
    """Return the fields of the mixture that config.json describes."""
    fields = dict(mixture.always)
    for field, key in mixture.keys.items():
        named = mixture.other_names.get(key, key) if key not in raw else key
        kind = type(getattr(MoE(), field))
        if key in mixture.values:
            fields[field] = _translated(raw, key, mixture, refuse)
        else:
            fields[field] = kind(_checked(raw, named, mixture.absent[key], kind, refuse))
    if mixture.shared is not None:
        fields["shared"] = _checked(raw, mixture.shared, mixture.absent[mixture.shared], int, refuse) * fields["ffn"]
    if mixture.dense is not None:
        dense = raw.get(mixture.dense) or []
        if dense != list(range(len(dense))) or len(dense) > num_layers:
            refuse(mixture.dense, "expected the first layers only: 0, 1, 2, ...")
        fields["first_dense"] = len(dense)
    if mixture.sparse is not None:
        fields["first_dense"] = _leading_dense(raw, mixture, num_layers, refuse)
    if fields.get("groups", 1) == 1:
        fields["active_groups"] = 1
    return fields


def _leading_dense(raw: Mapping[str, Any], mixture: MoEMapping, num_layers: int, refuse: RefuseFn) -> int:
    """Return the number of dense layers, which must be the first ones."""
    key = mixture.sparse
    assert key is not None
    words = raw.get(key)
    if words is None:
        words = ["dense"] * mixture.absent[key] + ["sparse"] * (num_layers - mixture.absent[key])
    first = words.count("dense") if isinstance(words, list) else 0
    if words != ["dense"] * first + ["sparse"] * (num_layers - first):
        refuse(key, f"expected {num_layers} words, first 'dense', then 'sparse'")
    return first


def _translated(raw: Mapping[str, Any], key: str, mixture: MoEMapping, refuse: RefuseFn) -> Any:
    """Return the value of a field of `MoE` for the value of a key of config.json."""
    value = raw.get(key, mixture.absent[key])
    for theirs, ours in mixture.values[key]:
        if value == theirs and not isinstance(value, bool):
            return ours
    return refuse(key, f"expected one of {', '.join(repr(theirs) for theirs, _ in mixture.values[key])}")


def write_mixture(mixture: MoEMapping, config: DecoderConfig) -> WrittenConfig:
    """Return the keys from which `read_mixture` reads the same mixture."""
    moe = config.feed_forward
    if moe is None:
        return {}, [] if mixture.optional else ["model.feed_forward=None, expected a mixture"]
    has = complete_moe_fields(config)
    raw = {key: has[field] for field, key in mixture.keys.items()}
    raw |= {key: next(a for a, b in pairs if b == raw[key]) for key, pairs in mixture.values.items()}
    expected = {name: value for name, value in _DEFAULTS.items() if name not in mixture.keys} | dict(mixture.always)
    if moe.groups == 1:
        expected["group_score"] = has["group_score"]
    if "ffn" not in mixture.keys:
        expected["ffn"] = config.ffn
    for name, key in (("shared", mixture.shared), ("first_dense", mixture.dense), ("first_dense", mixture.sparse)):
        if key is not None:
            expected.pop(name, None)
    if mixture.dense is not None:
        raw[mixture.dense] = list(range(moe.first_dense))
    elif mixture.sparse is not None:
        sparse = config.num_layers - moe.first_dense
        raw[mixture.sparse] = ["dense"] * moe.first_dense + ["sparse"] * sparse
    problems = [
        f"model.feed_forward.{name}={has[name]!r}, expected {value!r}"
        for name, value in expected.items()
        if has[name] != value
    ]
    if mixture.shared is not None:
        raw[mixture.shared], rest = divmod(moe.shared, has["ffn"])
        if rest or not moe.shared:
            problems.append(f"model.feed_forward.shared={moe.shared}, expected a multiple of an expert's {has['ffn']}")
    return raw, problems


def complete_moe_fields(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields of a decoder's mixture, with those that it leaves to the decoder filled in."""
    moe = config.feed_forward
    assert moe is not None
    gated = config.gated if moe.gated is None else moe.gated
    fields = {**vars(moe), "ffn": moe.ffn or config.ffn, "gated": gated}
    return fields | ({"active_groups": 1, "group_score": "best_two"} if moe.groups == 1 else {})


def read_latent(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    """Return the fields of `Latent`; config.json must have all of their keys."""
    return {
        field: _checked(raw, key, None, int, refuse, none=0 if field == "q_rank" else None)
        for field, key in LATENT_KEYS.items()
    }


def write_latent(config: DecoderConfig) -> WrittenConfig:
    """Return the keys from which `read_latent` reads the same fields."""
    if config.latent is None:
        return {}, ["model.latent=None, expected latent attention"]
    raw = {key: getattr(config.latent, field) for field, key in LATENT_KEYS.items()}
    raw[LATENT_KEYS["q_rank"]] = config.latent.q_rank or None
    return raw | {"num_key_value_heads": config.heads}, []


def _checked(raw: Mapping[str, Any], key: str, absent: Any, kind: type, refuse: RefuseFn, none: Any = None) -> Any:
    value = raw.get(key, absent)
    value = none if value is None else value
    if not is_json(value, kind):
        refuse(key, f"expected a value of type {kind.__name__}")
    return value
