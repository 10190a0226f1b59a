"""DeepSeek V2 and V3, Kimi K2, Dots and Youtu: latent attention, routing by groups of experts.

Sources: the modeling and configuration files of `transformers` 5.23 (deepseek_v2, deepseek_v3, dots1, youtu), its
conversion of weights, and the released configurations.
"""

from collections.abc import Mapping
from typing import Any

from ....models import DecoderConfig
from ..family import Family, MoEMapping, RefuseFn
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

LATENT_HEADS = {
    "attention.q_norm.scale": ("self_attn.q_a_layernorm.weight", "norm"),
    "attention.kv_norm.scale": ("self_attn.kv_a_layernorm.weight", "norm"),
    "attention.w_q": ("self_attn.q_proj.weight", "(heads head_dim) embed"),
    "attention.w_q_down": ("self_attn.q_a_proj.weight", "q_latent embed"),
    "attention.w_q_up": ("self_attn.q_b_proj.weight", "(heads head_dim) q_rank"),
    "attention.w_kv_down": ("self_attn.kv_a_proj_with_mqa.weight", "kv_latent embed"),
    "attention.w_kv_up": ("self_attn.kv_b_proj.weight", "(heads key_value) kv_rank"),
    "attention.w_o": ("self_attn.o_proj.weight", "embed (heads value_dim)"),
}

LATENT_FIELDS = without(ROTARY_KEYS, "attention_bias", "attention_output_bias", "kv_heads", "head_dim")

SHARED_EXPERTS = shared_expert("mlp.shared_experts")

GROUPED = MoEMapping(
    always={"scores": "sigmoid", "selection_bias": True},
    keys={
        "experts": "n_routed_experts",
        "active": "num_experts_per_tok",
        "ffn": "moe_intermediate_size",
        "first_dense": "first_k_dense_replace",
        "normalize_topk": "norm_topk_prob",
        "scale": "routed_scaling_factor",
        "groups": "n_group",
        "active_groups": "topk_group",
    },
    absent={
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "n_shared_experts": 1,
    },
    shared="n_shared_experts",
)
"""Experts chosen by sigmoids with a bias, from the best groups."""

ROTARY = RotaryMapping(interleaved="rope_interleave", scalings=("default", "yarn"), scores=True)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    title="DeepSeek-V3",
    architecture="DeepseekV3ForCausalLM",
    keys=LATENT_FIELDS,
    absent=ROTARY_ABSENT,
    only={
        "attention_bias": (False,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    rotary=ROTARY,
    weights=rotary_weights(PRE_NORMS, LATENT_HEADS | GATED | EXPERTS | SHARED_EXPERTS),
    mixture=GROUPED,
    latent=True,
    # It has its own code, with the same parts under the same names.
    also=("kimi_k2",),
    predicts_more=True,
)


def _groups_of_method(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    """Read the greedy method as one group of all experts."""
    greedy = raw.get("topk_method", "greedy") == "greedy"
    return {**raw, "n_group": 1, "topk_group": 1} if greedy else raw


def _write_method(config: DecoderConfig) -> tuple[dict[str, Any], list[str]]:
    moe = config.feed_forward
    return {"topk_method": "greedy" if moe is None or moe.groups == 1 else "group_limited_greedy"}, []


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    title="DeepSeek-V2",
    architecture="DeepseekV2ForCausalLM",
    keys=LATENT_FIELDS,
    absent=ROTARY_ABSENT,
    only={
        "topk_method": ("greedy", "group_limited_greedy"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "norm_topk_prob": (False,),
        "moe_layer_freq": (1,),
        "scoring_func": ("softmax",),
    },
    rotary=RotaryMapping(interleaved=True, scalings=("default", "yarn"), scores=True),
    weights=rotary_weights(PRE_NORMS, LATENT_HEADS | GATED | EXPERTS | SHARED_EXPERTS),
    mixture=MoEMapping(
        always={"scores": "softmax", "group_score": "best", "normalize_topk": False},
        keys=without(GROUPED.keys, "normalize_topk"),
        absent={
            **GROUPED.absent,
            "n_routed_experts": 64,
            "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "n_shared_experts": 2,
        },
        shared="n_shared_experts",
    ),
    latent=True,
    complete=_groups_of_method,
    write=_write_method,
    whole_heads=True,
)

YOUTU = Family(
    model_type="youtu",
    title="Youtu",
    architecture="YoutuForCausalLM",
    keys=LATENT_FIELDS,
    absent={**ROTARY_ABSENT, "tie_word_embeddings": True},
    only={"attention_bias": (False,)},
    rotary=ROTARY,
    weights=rotary_weights(PRE_NORMS, LATENT_HEADS | GATED),
    latent=True,
)

DOTS1 = Family(
    model_type="dots1",
    title="Dots 1",
    architecture="Dots1ForCausalLM",
    fields={"qk_norm": True},
    keys=ROTARY_KEYS,
    absent=ROTARY_ABSENT,
    only={"scoring_func": ("sigmoid", "noaux_tc"), "moe_layer_freq": (1,)},
    rotary=RotaryMapping(),
    windows=WindowMapping(
        absent=4096,
        sliding=lambda layer, raw: layer >= raw.get("max_window_layers", 62),
        beside=lambda num_layers: {"max_window_layers": num_layers},
        keys=("max_window_layers",),
    ),
    weights=rotary_weights({**PRE_NORMS, **QK_NORMS}, MULTI_HEAD | GATED | EXPERTS | SHARED_EXPERTS),
    mixture=MoEMapping(
        always=GROUPED.always,
        keys=GROUPED.keys,
        absent={
            **GROUPED.absent,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": None,
            "n_routed_experts": None,
            "num_experts_per_tok": None,
        },
        shared="n_shared_experts",
    ),
)

FAMILIES = (DEEPSEEK_V3, DEEPSEEK_V2, YOUTU, DOTS1)
