"""GLM 4 to 4.7, and Solar Open.

Sources: the modeling and configuration files of `transformers` 5.23 (glm, glm4, glm4_moe, glm4_moe_lite, solar_open), its
conversion of weights, and the released configurations.
"""

from collections.abc import Mapping
from typing import Any

from ....models import DecoderConfig
from ..family import Family, MoEMapping, RefuseFn
from ..rotary_positions import RotaryMapping
from ..tensor_names import (
    EXPERTS,
    FUSED_GATE,
    GATED,
    MULTI_HEAD,
    PRE_NORMS,
    QK_NORMS,
    ROTARY_ABSENT,
    ROTARY_KEYS,
    rotary_weights,
    without,
)
from .deepseek import GROUPED, LATENT_FIELDS, LATENT_HEADS, ROTARY, SHARED_EXPERTS

_KEYS = without(ROTARY_KEYS, "attention_output_bias")
_ABSENT = {
    **ROTARY_ABSENT,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
}

GLM = Family(
    model_type="glm",
    title="GLM-4 and GLM-Edge",
    architecture="GlmForCausalLM",
    keys=_KEYS,
    absent=_ABSENT,
    rotary=RotaryMapping(fraction=0.5, interleaved=True),
    weights=rotary_weights(PRE_NORMS, MULTI_HEAD | FUSED_GATE),
)

GLM4 = Family(
    model_type="glm4",
    title="GLM-4-0414 and GLM-Z1",
    architecture="Glm4ForCausalLM",
    fields={"post_norms": True},
    keys=_KEYS,
    absent=_ABSENT,
    rotary=RotaryMapping(fraction=0.5, interleaved=True),
    weights=rotary_weights(
        {
            **PRE_NORMS,
            "attention_post_norm.scale": "post_self_attn_layernorm.weight",
            "feed_forward_post_norm.scale": "post_mlp_layernorm.weight",
        },
        MULTI_HEAD | FUSED_GATE,
    ),
)

_GROUPED_ABSENT = {
    **GROUPED.absent,
    "n_routed_experts": 128,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}

GLM4_MOE = Family(
    model_type="glm4_moe",
    title="GLM-4.5, 4.6 and 4.7",
    architecture="Glm4MoeForCausalLM",
    keys={**_KEYS, "qk_norm": "use_qk_norm"},
    absent={**ROTARY_ABSENT, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "use_qk_norm": False},
    rotary=RotaryMapping(fraction=0.5),
    weights=rotary_weights({**PRE_NORMS, **QK_NORMS}, MULTI_HEAD | GATED | EXPERTS | SHARED_EXPERTS),
    mixture=MoEMapping(always=GROUPED.always, keys=GROUPED.keys, absent=_GROUPED_ABSENT, shared="n_shared_experts"),
    predicts_more=True,
)

GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    title="GLM-4.7-Flash",
    architecture="Glm4MoeLiteForCausalLM",
    keys=LATENT_FIELDS,
    absent={**ROTARY_ABSENT, "rms_norm_eps": 1e-5},
    only={"attention_bias": (False,)},
    rotary=ROTARY,
    weights=rotary_weights(PRE_NORMS, LATENT_HEADS | GATED | EXPERTS | SHARED_EXPERTS),
    mixture=MoEMapping(
        always=GROUPED.always,
        keys=without(GROUPED.keys, "first_dense"),
        absent={
            **_GROUPED_ABSENT,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "mlp_layer_types": 1,
        },
        shared="n_shared_experts",
        sparse="mlp_layer_types",
    ),
    latent=True,
    predicts_more=True,
)


def _no_dense_layers(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    """Return the width of dense layers: none exist, so this is unused."""
    return {"ffn": raw.get("moe_intermediate_size", 1280)}


def _write_solar(config: DecoderConfig) -> tuple[dict[str, Any], list[str]]:
    width = 0 if config.feed_forward is None else config.feed_forward.ffn
    same = width in (0, config.ffn)
    return {}, [] if same else [f"model.ffn={config.ffn}, expected the experts' {width}: no layer is dense"]


SOLAR_OPEN = Family(
    model_type="solar_open",
    title="Solar Open",
    architecture="SolarOpenForCausalLM",
    keys=without(ROTARY_KEYS, "attention_output_bias", "ffn"),
    absent={**ROTARY_ABSENT, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    rotary=RotaryMapping(theta=1_000_000.0, fraction=1.0),
    weights=rotary_weights(PRE_NORMS, MULTI_HEAD | EXPERTS | SHARED_EXPERTS),
    mixture=MoEMapping(
        always=GROUPED.always,
        keys=without(GROUPED.keys, "first_dense"),
        absent={**_GROUPED_ABSENT, "moe_intermediate_size": 1280},
        shared="n_shared_experts",
    ),
    computed=("ffn",),
    read=_no_dense_layers,
    write=_write_solar,
)

FAMILIES = (GLM4, GLM, GLM4_MOE, GLM4_MOE_LITE, SOLAR_OPEN)
