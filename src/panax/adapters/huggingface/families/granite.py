"""Granite 3 and 4, and HyperCLOVA X: four multipliers, with and without experts.

Sources: the modeling and configuration files of `transformers` 5.23 (granite, granitemoe, granitemoeshared, hyperclovax), its
conversion of weights, and the released configurations.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from ....models import DecoderConfig
from ..family import Family, MoEMapping, RefuseFn
from ..json_values import is_json
from ..rotary_positions import RotaryMapping
from ..tensor_names import GATED, MULTI_HEAD, PRE_NORMS, ROTARY_ABSENT, ROTARY_KEYS, rotary_weights, without

_KEYS = without(
    ROTARY_KEYS, "head_dim", embed_multiplier="embedding_multiplier", residual_multiplier="residual_multiplier"
)

_ABSENT = {**ROTARY_ABSENT, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}


def _read_multipliers(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    """Read the multipliers of scores and of logits, of which the settings here are inverses."""
    values = {key: raw.get(key, 1.0) for key in ("attention_multiplier", "logits_scaling")}
    for key, value in values.items():
        if not is_json(value, float) or not 0 < value < math.inf:
            refuse(key, "expected a positive number")
    return {
        "query_scale": float(values["attention_multiplier"]) ** -2.0,
        "logit_multiplier": 1.0 / values["logits_scaling"],
    }


def _write_multipliers(config: DecoderConfig) -> tuple[dict[str, Any], list[str]]:
    scale = float(config.query_scale or config.head_size)
    return {
        "attention_multiplier": _exact(lambda x: x**-2.0, scale, scale**-0.5),
        "logits_scaling": _exact(lambda x: 1.0 / x, config.logit_multiplier, 1.0 / config.logit_multiplier),
    }, []


def _exact(read: Callable[[float], float], value: float, near: float) -> float:
    """Return the float near `near` for which `read` returns exactly `value`; `near` if there is none."""
    around = [near, math.nextafter(near, math.inf), math.nextafter(near, 0.0)]
    # A shorter number is likelier the one that was written.
    candidates = [float(f"{near:.15g}"), *around]
    return next((x for x in candidates if read(x) == value), near)


GRANITE = Family(
    model_type="granite",
    title="Granite",
    architecture="GraniteForCausalLM",
    keys=_KEYS,
    absent=_ABSENT,
    only={"mlp_bias": (False,)},
    rotary=RotaryMapping(),
    weights=rotary_weights(PRE_NORMS),
    computed=("query_scale", "logit_multiplier"),
    read=_read_multipliers,
    write=_write_multipliers,
)

_EXPERTS = {
    "feed_forward.router.w": ("block_sparse_moe.router.layer.weight", "router embed"),
    "feed_forward.experts.w_gate": ("block_sparse_moe.input_linear.weight", "expert (2 expert_ffn) embed", 0),
    "feed_forward.experts.w_up": ("block_sparse_moe.input_linear.weight", "expert (2 expert_ffn) embed", 1),
    "feed_forward.experts.w_down": ("block_sparse_moe.output_linear.weight", "expert embed expert_ffn"),
}

_SHARED = {
    "feed_forward.shared.w_gate": ("shared_mlp.input_linear.weight", "(2 ffn) embed", 0),
    "feed_forward.shared.w_up": ("shared_mlp.input_linear.weight", "(2 ffn) embed", 1),
    "feed_forward.shared.w_down": ("shared_mlp.output_linear.weight", "embed ffn"),
}

_MIXTURE = MoEMapping(
    # The softmax is over the chosen experts: over all of them, divided by the sum of the chosen.
    always={"ffn": 0},
    keys={"experts": "num_local_experts", "active": "num_experts_per_tok"},
    absent={"num_local_experts": 8, "num_experts_per_tok": 2},
)

GRANITE_MOE = Family(
    model_type="granitemoe",
    title="Granite mixture of experts",
    architecture="GraniteMoeForCausalLM",
    keys=_KEYS,
    absent=_ABSENT,
    rotary=RotaryMapping(),
    weights=rotary_weights(PRE_NORMS, MULTI_HEAD | _EXPERTS),
    mixture=_MIXTURE,
    computed=("query_scale", "logit_multiplier"),
    read=_read_multipliers,
    write=_write_multipliers,
)

GRANITE_MOE_SHARED = Family(
    model_type="granitemoeshared",
    title="Granite mixture with a shared expert",
    architecture="GraniteMoeSharedForCausalLM",
    keys=_KEYS,
    absent=_ABSENT,
    rotary=RotaryMapping(),
    weights=rotary_weights(PRE_NORMS, MULTI_HEAD | GATED | _EXPERTS | _SHARED),
    mixture=MoEMapping(
        always=_MIXTURE.always,
        keys={**_MIXTURE.keys, "shared": "shared_intermediate_size"},
        absent={**_MIXTURE.absent, "shared_intermediate_size": 0},
    ),
    computed=("query_scale", "logit_multiplier"),
    read=_read_multipliers,
    write=_write_multipliers,
)


def _scores_of_width(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    """Fill in the multiplier of scores: by default the usual one of the heads' width."""
    width = raw.get("head_dim") or raw.get("hidden_size", 0) // max(raw.get("num_attention_heads", 1), 1)
    usual = raw.get("attention_multiplier") is None and is_json(width, int) and width > 0
    return {**raw, "attention_multiplier": width**-0.5} if usual else raw


def _read_scores(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    return {"query_scale": _read_multipliers({**raw, "logits_scaling": 1.0}, refuse)["query_scale"]}


def _write_scores(config: DecoderConfig) -> tuple[dict[str, Any], list[str]]:
    return {"attention_multiplier": _write_multipliers(config)[0]["attention_multiplier"]}, []


HYPERCLOVAX = Family(
    model_type="hyperclovax",
    title="HyperCLOVA X",
    architecture="HyperCLOVAXForCausalLM",
    # Its logits are multiplied by what Granite's are divided by.
    keys={**_KEYS, "head_dim": "head_dim", "logit_multiplier": "logits_scaling", "post_norms": "use_post_norm"},
    absent={**_ABSENT, "logits_scaling": 1.0, "use_post_norm": True},
    only={"mlp_bias": (False,)},
    rotary=RotaryMapping(),
    weights=rotary_weights(
        {
            **PRE_NORMS,
            "attention_post_norm.scale": "post_norm1.weight",
            "feed_forward_post_norm.scale": "post_norm2.weight",
        }
    ),
    complete=_scores_of_width,
    computed=("query_scale",),
    read=_read_scores,
    write=_write_scores,
    preferred=False,
    whole_heads=True,
)

FAMILIES = (GRANITE, GRANITE_MOE, GRANITE_MOE_SHARED, HYPERCLOVAX)
