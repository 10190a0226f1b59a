"""Qwen 2, 2.5 and 3, with and without experts; Qwen3-Next and Qwen3.5 with gated delta nets, and gated attention in every
fourth layer.

Sources: the modeling and configuration files of `transformers` 5.23 (qwen2, qwen2_moe, qwen3, qwen3_moe, qwen3_next,
qwen3_5, qwen3_5_moe), its conversion of weights, and the released configurations. Layers that predict further tokens
(`mtp.`) are not computed, as in `transformers`; they are exported unchanged.
"""

import re
from collections.abc import Mapping
from typing import Any

from ....models import DeltaNetConfig
from ..family import Family, MoEMapping, RefuseFn
from ..json_values import WrittenConfig
from ..pattern import GroupedPattern
from ..rotary_positions import RotaryMapping
from ..sliding_windows import WindowMapping
from ..tensor_names import (
    EXPERTS,
    GATED,
    MULTI_HEAD,
    PRE_NORMS,
    QK_NORMS,
    ROTARY_ABSENT,
    ROTARY_KEYS,
    rotary_weights,
    shared_expert,
    without,
)


def _after_the_first(layer: int, raw: Any) -> bool:
    return layer >= raw.get("max_window_layers", 28)


def _every_second(layer: int, raw: Any) -> bool:
    return layer % 2 == 0 and layer < raw.get("max_window_layers", 28)


_WINDOWS = WindowMapping(
    absent=4096,
    sliding=_after_the_first,
    switch="use_sliding_window",
    beside=lambda num_layers: {"max_window_layers": num_layers},
    keys=("max_window_layers",),
)

QWEN2 = Family(
    model_type="qwen2",
    title="Qwen2 and Qwen2.5",
    architecture="Qwen2ForCausalLM",
    fields={"attention_bias": True},
    keys=without(ROTARY_KEYS, "attention_bias", "attention_output_bias", "head_dim"),
    absent=ROTARY_ABSENT,
    rotary=RotaryMapping(),
    windows=_WINDOWS,
    weights=rotary_weights(PRE_NORMS),
    # The text towers of models with vision.
    also=("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
)

QWEN3 = Family(
    model_type="qwen3",
    title="Qwen3",
    architecture="Qwen3ForCausalLM",
    fields={"qk_norm": True},
    keys=ROTARY_KEYS,
    absent={**ROTARY_ABSENT, "head_dim": 128},
    rotary=RotaryMapping(),
    windows=_WINDOWS,
    weights=rotary_weights({**PRE_NORMS, **QK_NORMS}),
    also=("qwen3_vl_text",),
)

_MIXTURE = MoEMapping(
    always={},
    keys={
        "experts": "num_experts",
        "active": "num_experts_per_tok",
        "ffn": "moe_intermediate_size",
        "every": "decoder_sparse_step",
        "normalize_topk": "norm_topk_prob",
    },
    absent={
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
    },
    other_names={"num_experts": "num_local_experts"},
    dense="mlp_only_layers",
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    title="Qwen3 mixture of experts",
    architecture="Qwen3MoeForCausalLM",
    fields={"qk_norm": True},
    keys=ROTARY_KEYS,
    absent=ROTARY_ABSENT,
    only={"use_sliding_window": (False,)},
    rotary=RotaryMapping(),
    weights=rotary_weights({**PRE_NORMS, **QK_NORMS}, MULTI_HEAD | GATED | EXPERTS),
    mixture=_MIXTURE,
)

_SHARED_EXPERTS = {
    **EXPERTS,
    **shared_expert("mlp.shared_expert"),
    "feed_forward.w_shared_gate": ("mlp.shared_expert_gate.weight", "1 embed"),
}
"""Experts, and the shared one with its gate."""

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    title="Qwen1.5 and Qwen2 mixture of experts",
    architecture="Qwen2MoeForCausalLM",
    keys=without(ROTARY_KEYS, "attention_output_bias", "head_dim", attention_bias="qkv_bias"),
    absent={**ROTARY_ABSENT, "qkv_bias": True},
    rotary=RotaryMapping(),
    windows=WindowMapping(
        absent=4096,
        sliding=_every_second,
        switch="use_sliding_window",
        beside=lambda num_layers: {"max_window_layers": num_layers},
        keys=("max_window_layers",),
    ),
    weights=rotary_weights(
        PRE_NORMS,
        {
            **MULTI_HEAD,
            **GATED,
            **_SHARED_EXPERTS,
        },
    ),
    mixture=MoEMapping(
        always={"shared_gate": True},
        keys={**_MIXTURE.keys, "shared": "shared_expert_intermediate_size"},
        absent={
            **_MIXTURE.absent,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        other_names=_MIXTURE.other_names,
        dense="mlp_only_layers",
    ),
)

FULL, LINEAR = "full_attention", "linear_attention"
"""Values of `layer_types`."""

INTERVAL = "full_attention_interval"
"""Key of the period of attention layers, without `layer_types`."""

_DELTA_KEYS = without(
    ROTARY_KEYS,
    "attention_bias",
    "attention_output_bias",
    delta_heads="linear_num_value_heads",
    delta_value_dim="linear_value_head_dim",
    delta_key_heads="linear_num_key_heads",
    delta_key_dim="linear_key_head_dim",
    conv_taps="linear_conv_kernel_dim",
)

_DELTA_ABSENT = {
    **ROTARY_ABSENT,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}

_DELTA_FIELDS = {"qk_norm": True, "norm_unit_offset": True, "attention_gate": True}

# The delta net's convolutions have the activation of the feed-forward; its gate has silu.
_DELTA_ONLY = {"attention_bias": (False,), "hidden_act": ("silu", "swish")}

_DELTA_ROTARY = RotaryMapping(fraction=0.25)

_CARRIED = re.compile(r"^mtp\.")

_DELTA_NORMS = {**PRE_NORMS, **QK_NORMS, "mixer_norm.scale": "input_layernorm.weight"}

_ATTENTION = {
    **{name: source for name, source in MULTI_HEAD.items() if ".b_" not in name},
    "attention.w_q": ("self_attn.q_proj.weight", "(heads 2 head_dim) embed", 0),
    "attention.w_gate": ("self_attn.q_proj.weight", "(heads 2 head_dim) embed", 1),
}

_KEY, _VALUE = "delta_key_heads delta_key_dim", "delta_heads delta_value_dim"

_CONVOLVED = f"({_KEY}|{_KEY}|{_VALUE})"

_MIXER = {
    **{f"mixer.conv_{name}": ("linear_attn.conv1d.weight", f"{_CONVOLVED} 1 tap", at) for at, name in enumerate("qkv")},
    "mixer.dt_bias": ("linear_attn.dt_bias", "delta_heads"),
    "mixer.a_log": ("linear_attn.A_log", "delta_heads"),
    "mixer.scale": ("linear_attn.norm.weight", "delta_value_dim"),
    "mixer.w_o": ("linear_attn.out_proj.weight", f"embed ({_VALUE})"),
}

_QKVZ = GroupedPattern(f"(delta_key_heads: {_KEY}|{_KEY}|{_VALUE}|{_VALUE}) embed")
_BA = GroupedPattern("(delta_key_heads: delta_heads|delta_heads) embed")

_FUSED = {
    **{f"mixer.w_{name}": ("linear_attn.in_proj_qkvz.weight", _QKVZ, at) for at, name in enumerate("qkvz")},
    "mixer.w_beta": ("linear_attn.in_proj_ba.weight", _BA, 0),
    "mixer.w_dt": ("linear_attn.in_proj_ba.weight", _BA, 1),
}
"""Projections of Qwen3-Next: for each key head its query, key, and the values and gates of its value heads."""

_SEPARATE = {
    **{
        f"mixer.w_{name}": ("linear_attn.in_proj_qkv.weight", f"{_CONVOLVED} embed", at)
        for at, name in enumerate("qkv")
    },
    "mixer.w_z": ("linear_attn.in_proj_z.weight", f"({_VALUE}) embed"),
    "mixer.w_beta": ("linear_attn.in_proj_b.weight", "delta_heads embed"),
    "mixer.w_dt": ("linear_attn.in_proj_a.weight", "delta_heads embed"),
}


def _read_layers(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    """Read which layers attend: those of `layer_types`, or every n-th."""
    count, kinds, interval = raw["num_hidden_layers"], raw.get("layer_types"), raw.get(INTERVAL, 4)
    if kinds is None:
        if type(interval) is not int or interval < 1:
            refuse(INTERVAL, "expected a positive number of layers")
        kinds = [LINEAR if (layer + 1) % interval else FULL for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in (FULL, LINEAR) for kind in kinds):
        refuse("layer_types", f"expected a list of {count}, {LINEAR!r} or {FULL!r} for each layer")
    return {"attention_layers": tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)}


def _write_layers(config: DeltaNetConfig) -> WrittenConfig:
    attending = set(config.attention_layers)
    kinds = [FULL if layer in attending else LINEAR for layer in range(config.num_layers)]
    return {"layer_types": kinds, "attention_bias": False}, []


_DELTA_MIXTURE = MoEMapping(
    always={"shared_gate": True},
    keys={**_MIXTURE.keys, "shared": "shared_expert_intermediate_size"},
    absent={
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    dense="mlp_only_layers",
)

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    title="Qwen3-Next",
    architecture="Qwen3NextForCausalLM",
    fields=_DELTA_FIELDS,
    keys=_DELTA_KEYS,
    absent={**_DELTA_ABSENT, "intermediate_size": 5632},
    only=_DELTA_ONLY,
    rotary=_DELTA_ROTARY,
    weights=rotary_weights(_DELTA_NORMS, _ATTENTION | GATED | _SHARED_EXPERTS | _MIXER | _FUSED),
    mixture=_DELTA_MIXTURE,
    config=DeltaNetConfig,
    computed=("attention_layers",),
    read=_read_layers,
    write=_write_layers,
    carried=_CARRIED,
)

QWEN3_5 = Family(
    model_type="qwen3_5_text",
    title="Qwen3.5",
    architecture="Qwen3_5ForCausalLM",
    fields=_DELTA_FIELDS,
    keys=_DELTA_KEYS,
    absent={**_DELTA_ABSENT, "num_key_value_heads": 4, "intermediate_size": 12288},
    only=_DELTA_ONLY,
    rotary=_DELTA_ROTARY,
    weights=rotary_weights(_DELTA_NORMS, _ATTENTION | GATED | _MIXER | _SEPARATE),
    config=DeltaNetConfig,
    computed=("attention_layers",),
    read=_read_layers,
    write=_write_layers,
    carried=_CARRIED,
    # The text towers of models with vision.
    also=("qwen3_5",),
)

QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    title="Qwen3.5 mixture of experts",
    architecture="Qwen3_5MoeForCausalLM",
    fields=_DELTA_FIELDS,
    # No layer is dense.
    keys={**_DELTA_KEYS, "ffn": "moe_intermediate_size"},
    absent={**_DELTA_ABSENT, "moe_intermediate_size": 512},
    only=_DELTA_ONLY,
    rotary=_DELTA_ROTARY,
    weights=rotary_weights(_DELTA_NORMS, _ATTENTION | _SHARED_EXPERTS | _MIXER | _SEPARATE),
    mixture=MoEMapping(
        always={"ffn": 0, "shared_gate": True},
        keys={"experts": "num_experts", "active": "num_experts_per_tok", "shared": "shared_expert_intermediate_size"},
        absent={"num_experts": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512},
    ),
    config=DeltaNetConfig,
    computed=("attention_layers",),
    read=_read_layers,
    write=_write_layers,
    carried=_CARRIED,
    also=("qwen3_5_moe",),
)

FAMILIES = (QWEN2, QWEN3, QWEN3_MOE, QWEN2_MOE, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
