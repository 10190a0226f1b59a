"""Hunyuan 1, with queries and keys normalized after their rotation, and 3, before it.

Sources: the modeling and configuration files of `transformers` 5.23 (hunyuan_v1_dense, hunyuan_v1_moe, hy_v3), its conversion of
weights, and the released configurations.
"""

from collections.abc import Mapping
from typing import Any

from ....models import DecoderConfig
from ..family import Family, MoEMapping, RefuseFn, TensorSource
from ..json_values import is_json
from ..pattern import Pattern
from ..rotary_positions import PLACES, RotaryMapping
from ..tensor_names import (
    GATED,
    MULTI_HEAD,
    PRE_NORMS,
    QK_NORMS,
    ROTARY_ABSENT,
    ROTARY_KEYS,
    experts,
    rotary_weights,
    shared_expert,
)

_FIELDS = {"qk_norm": True, "qk_norm_after_rotary": True}
_ABSENT = {**ROTARY_ABSENT, "rms_norm_eps": 1e-5}

_NORMS = {
    **PRE_NORMS,
    "attention.q_norm.scale": "self_attn.query_layernorm.weight",
    "attention.k_norm.scale": "self_attn.key_layernorm.weight",
}


def _raised_base(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    """Read `alpha` of a dynamic scaling, which raises the base of the positions at every length."""
    key = next((place for place in PLACES if raw.get(place)), PLACES[1])
    inner = raw.get(key)
    if not isinstance(inner, dict) or inner.get("rope_type", inner.get("type")) != "dynamic" or not inner.get("alpha"):
        return raw
    theta, alpha = inner.get("rope_theta", raw.get("rope_theta", 10_000.0)), inner["alpha"]
    width = raw.get("head_dim") or raw.get("hidden_size", 0) // max(raw.get("num_attention_heads", 1), 1)
    if not is_json(theta, float) or not is_json(alpha, float) or not is_json(width, int) or alpha <= 0 or width <= 2:
        refuse(key, "expected alpha and rope_theta to be positive numbers, and heads of more than 2 features")
    return {**raw, key: {"rope_type": "default", "rope_theta": theta * alpha ** (width / (width - 2))}}


HUNYUAN_DENSE = Family(
    model_type="hunyuan_v1_dense",
    title="Hunyuan",
    architecture="HunYuanDenseV1ForCausalLM",
    fields=_FIELDS,
    keys=ROTARY_KEYS,
    absent=_ABSENT,
    rotary=RotaryMapping(),
    weights=rotary_weights(_NORMS),
    complete=_raised_base,
)


def _same_in_all_layers(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    """Read numbers of experts that are listed for each layer."""
    raw = dict(_raised_base(raw, refuse))
    for key in ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size"):
        value = raw.get(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                refuse(key, "expected the same number in all layers")
            raw[key] = value[0]
    if raw.get("num_shared_expert", 1) != 1:
        refuse("num_shared_expert", "the decoder computes 1 only, as `transformers` does")
    width = raw.get("intermediate_size")
    if raw.get("moe_intermediate_size", width) != width:
        refuse("moe_intermediate_size", f"expected intermediate_size={width!r}, with which `transformers` computes")
    return raw


def _shared_width(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    raw = _same_in_all_layers(raw, refuse)
    return {**raw, "shared_width": raw.get("intermediate_size")}


def _write_shared(config: DecoderConfig) -> tuple[dict[str, Any], list[str]]:
    moe = config.feed_forward
    wrong = (
        []
        if moe is None or moe.shared == config.ffn
        else [f"model.feed_forward.shared={moe.shared}, expected {config.ffn}"]
    )
    return {}, wrong


HUNYUAN_MOE = Family(
    model_type="hunyuan_v1_moe",
    title="Hunyuan mixture of experts",
    architecture="HunYuanMoEV1ForCausalLM",
    fields=_FIELDS,
    keys=ROTARY_KEYS,
    absent=_ABSENT,
    rotary=RotaryMapping(),
    weights=rotary_weights(
        _NORMS,
        MULTI_HEAD
        | GATED
        | experts("mlp", "gate_proj", "up_proj", "down_proj", "gate.wg")
        | shared_expert("mlp.shared_mlp"),
    ),
    mixture=MoEMapping(
        always={"ffn": 0},
        keys={"experts": "num_experts", "active": "moe_topk", "shared": "shared_width"},
        absent={"num_experts": 1, "moe_topk": 1, "shared_width": 0},
        other_names={"num_experts": "num_local_experts", "moe_topk": "num_experts_per_tok"},
    ),
    complete=_shared_width,
    write=_write_shared,
)

HY_V3 = Family(
    model_type="hy_v3",
    title="Hunyuan 3",
    architecture="HYV3ForCausalLM",
    fields={"qk_norm": True},
    keys=ROTARY_KEYS,
    absent={**_ABSENT, "num_key_value_heads": 8, "head_dim": 128},
    only={"mlp_bias": (False,)},
    rotary=RotaryMapping(theta=11_158_840.0),
    weights=rotary_weights(
        {**PRE_NORMS, **QK_NORMS},
        MULTI_HEAD
        | GATED
        | experts("mlp", "gate_proj", "up_proj", "down_proj", "router.gate")
        | shared_expert("mlp.shared_mlp"),
    ),
    mixture=MoEMapping(
        always={"scores": "sigmoid", "selection_bias": True},
        keys={
            "experts": "num_experts",
            "active": "num_experts_per_tok",
            "ffn": "moe_intermediate_size",
            "scale": "router_scaling_factor",
        },
        absent={
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
            "num_shared_experts": 1,
            "mlp_layer_types": 1,
        },
        shared="num_shared_experts",
        sparse="mlp_layer_types",
        bias=TensorSource("model.layers.{layer}.mlp.expert_bias", Pattern("router")),
    ),
    predicts_more=True,
)

FAMILIES = (HUNYUAN_DENSE, HUNYUAN_MOE, HY_V3)
