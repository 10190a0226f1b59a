"""Families with mixtures of experts. In the files each expert has its own tensors; DBRX has one for all
experts of a layer.

Sources: the modelling and configuration files of `transformers` 5.23 (mixtral, qwen3_moe, deepseek_v3, dbrx),
its conversion of weights, and the configurations that were released with the models.
"""

from .family import (
    GATED,
    MULTI_HEAD,
    PLAIN_FIELDS,
    PRE_NORMS,
    ROTARY,
    ROTARY_ABSENT,
    ROTARY_KEYS,
    Family,
    MoEMapping,
    map_weights,
    rotary_weights,
)

SELECTION_BIAS = "model.layers.{layer}.mlp.gate.e_score_correction_bias"
"""Tensor of a layer's selection biases, which are not a parameter but model state."""


def _experts(start: str, gate: str, up: str, down: str) -> dict[str, tuple[str, str]]:
    return {
        "feed_forward.router.w": (f"{start}.gate.weight", "router embed"),
        "feed_forward.experts.w_gate": (f"{start}.experts.{{expert}}.{gate}.weight", "expert_ffn embed"),
        "feed_forward.experts.w_up": (f"{start}.experts.{{expert}}.{up}.weight", "expert_ffn embed"),
        "feed_forward.experts.w_down": (f"{start}.experts.{{expert}}.{down}.weight", "embed expert_ffn"),
    }


SOFTMAX = {"scores": "softmax", "scale": 1.0, "groups": 1, "selection_bias": False, "shared": 0}

MIXTRAL = Family(
    model_type="mixtral",
    title="Mixtral",
    architecture="MixtralForCausalLM",
    prefix="model.",
    always={
        **PLAIN_FIELDS,
        **ROTARY,
        "qk_norm": False,
        "attention_bias": False,
        "attention_output_bias": False,
        "latent": None,
        "attention_clip": None,
    },
    keys={field: key for field, key in ROTARY_KEYS.items() if key != "attention_bias"},
    absent={**ROTARY_ABSENT, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1_000_000.0},
    only={"sliding_window": (None,)},
    weights=rotary_weights(PRE_NORMS, MULTI_HEAD | _experts("block_sparse_moe", "w1", "w3", "w2")),
    mixture=MoEMapping(
        always={**SOFTMAX, "ffn": 0, "every": 1, "first_dense": 0, "normalize_topk": True},
        keys={"experts": "num_local_experts", "active": "num_experts_per_tok"},
        absent={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    title="Qwen3 mixture of experts",
    architecture="Qwen3MoeForCausalLM",
    prefix="model.",
    always={**PLAIN_FIELDS, **ROTARY, "qk_norm": True, "latent": None, "attention_clip": None},
    keys=ROTARY_KEYS,
    absent=ROTARY_ABSENT,
    only={"use_sliding_window": (False,)},
    weights=rotary_weights(
        {
            **PRE_NORMS,
            "attention.q_norm.scale": "self_attn.q_norm.weight",
            "attention.k_norm.scale": "self_attn.k_norm.weight",
        },
        MULTI_HEAD | GATED | _experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    mixture=MoEMapping(
        always=SOFTMAX,
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
    ),
    whole_heads=False,
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    title="DeepSeek-V3",
    architecture="DeepseekV3ForCausalLM",
    prefix="model.",
    always={
        **PLAIN_FIELDS,
        **ROTARY,
        "qk_norm": False,
        "attention_bias": False,
        "attention_output_bias": False,
        "attention_clip": None,
    },
    keys={
        field: key
        for field, key in ROTARY_KEYS.items()
        if key not in ("attention_bias", "num_key_value_heads", "head_dim")
    },
    absent=ROTARY_ABSENT,
    only={
        "attention_bias": (False,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    weights=rotary_weights(
        PRE_NORMS,
        {
            "attention.q_norm.scale": ("self_attn.q_a_layernorm.weight", "norm"),
            "attention.kv_norm.scale": ("self_attn.kv_a_layernorm.weight", "norm"),
            "attention.w_q": ("self_attn.q_proj.weight", "(heads head_dim) embed"),
            "attention.w_q_down": ("self_attn.q_a_proj.weight", "q_latent embed"),
            "attention.w_q_up": ("self_attn.q_b_proj.weight", "(heads head_dim) q_rank"),
            "attention.w_kv_down": ("self_attn.kv_a_proj_with_mqa.weight", "kv_latent embed"),
            "attention.w_kv_up": ("self_attn.kv_b_proj.weight", "(heads key_value) kv_rank"),
            "attention.w_o": ("self_attn.o_proj.weight", "embed (heads value_dim)"),
            **GATED,
            **_experts("mlp", "gate_proj", "up_proj", "down_proj"),
            "feed_forward.shared.w_gate": ("mlp.shared_experts.gate_proj.weight", "ffn embed"),
            "feed_forward.shared.w_up": ("mlp.shared_experts.up_proj.weight", "ffn embed"),
            "feed_forward.shared.w_down": ("mlp.shared_experts.down_proj.weight", "embed ffn"),
        },
    ),
    scalings=("default", "yarn"),
    mixture=MoEMapping(
        always={"every": 1, "scores": "sigmoid", "group_score": "best_two", "selection_bias": True},
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
    ),
    latent=True,
    # It has its own code, with the same parts under the same names.
    also=("kimi_k2",),
    predicts_more=True,
    whole_heads=False,
)

_QKV = ("norm_attn_norm.attn.Wqkv.weight", "(heads+kv_heads+kv_heads head_dim) embed")

DBRX = Family(
    model_type="dbrx",
    title="DBRX",
    architecture="DbrxForCausalLM",
    prefix="transformer.",
    always={
        **PLAIN_FIELDS,
        "norm": "layer_unbiased",
        # The epsilon of PyTorch's LayerNorm, which is built without one.
        "norm_epsilon": 1e-5,
        "gated": True,
        "feed_forward_bias": False,
        "qk_norm": False,
        "attention_bias": False,
        "attention_output_bias": False,
        "latent": None,
        "tied": False,
    },
    keys={
        "vocab_size": "vocab_size",
        "max_length": "max_seq_len",
        "embed": "d_model",
        "num_layers": "n_layers",
        "heads": "n_heads",
        "kv_heads": "attn_config.kv_n_heads",
        "attention_clip": "attn_config.clip_qkv",
        "ffn": "ffn_config.ffn_hidden_size",
        "activation": "ffn_config.ffn_act_fn.name",
    },
    absent={
        "attn_config.kv_n_heads": 1,
        "attn_config.clip_qkv": None,
        "ffn_config.ffn_hidden_size": 3584,
        "ffn_config.ffn_act_fn.name": "silu",
    },
    only={"tie_word_embeddings": (False,)},
    weights=map_weights(
        "transformer.",
        {"embedding.table": ("wte.weight", "vocab embed"), "final_norm.scale": ("norm_f.weight", "norm")},
        {
            "attention_norm.scale": ("norm_attn_norm.norm_1.weight", "norm"),
            "attention.w_q": (*_QKV, 0),
            "attention.w_k": (*_QKV, 1),
            "attention.w_v": (*_QKV, 2),
            "attention.w_o": ("norm_attn_norm.attn.out_proj.weight", "embed (heads head_dim)"),
            "feed_forward_norm.scale": ("norm_attn_norm.norm_2.weight", "norm"),
            "feed_forward.router.w": ("ffn.router.layer.weight", "router embed"),
            "feed_forward.experts.w_gate": ("ffn.experts.mlp.w1", "(expert expert_ffn) embed"),
            "feed_forward.experts.w_up": ("ffn.experts.mlp.v1", "(expert expert_ffn) embed"),
            "feed_forward.experts.w_down": ("ffn.experts.mlp.w2", "(expert expert_ffn) embed"),
        },
        blocks="blocks",
    ),
    scalings=("default",),
    mixture=MoEMapping(
        always={**SOFTMAX, "ffn": 0, "every": 1, "first_dense": 0},
        keys={
            "experts": "ffn_config.moe_num_experts",
            "active": "ffn_config.moe_top_k",
            "normalize_topk": "ffn_config.moe_normalize_expert_weights",
        },
        absent={
            "ffn_config.moe_num_experts": 4,
            "ffn_config.moe_top_k": 1,
            "ffn_config.moe_normalize_expert_weights": 1.0,
        },
        # The order of the norm by which a token's weights are divided: 1, which is their sum, or None for no
        # division.
        values={"ffn_config.moe_normalize_expert_weights": ((1.0, True), (None, False))},
    ),
    nested=("attn_config", "ffn_config"),
    theta="attn_config.rope_theta",
    needed=("attention_clip",),
)

FAMILIES = (MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, DBRX)
