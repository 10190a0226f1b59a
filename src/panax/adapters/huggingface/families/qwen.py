"""Qwen 2, 2.5 and 3, with and without experts.

Sources: the modelling and configuration files of `transformers` 5.23 (qwen2, qwen2_moe, qwen3, qwen3_moe), its conversion
of weights, and the released configurations.
"""

from typing import Any

from ..family import Family, MoEMapping
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
            **EXPERTS,
            **shared_expert("mlp.shared_expert"),
            "feed_forward.w_shared_gate": ("mlp.shared_expert_gate.weight", "1 embed"),
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

FAMILIES = (QWEN2, QWEN3, QWEN3_MOE, QWEN2_MOE)
