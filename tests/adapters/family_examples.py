"""Settings of a tiny model of each family, in `transformers`' terms: every part that is particular to the family is at
work on 24 tokens, and nothing is neutral."""

from typing import Any

VOCABULARY = 96

COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
ROTARY: dict[str, Any] = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "mscale": 2.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.3, 2.0, 3.5],
    "long_factor": [1.0, 2.0, 5.0, 9.0],
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
GROWING = {**YARN, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "original_max_position_embeddings": 8}

THREE = {**ROTARY, "num_hidden_layers": 3}
FOUR = {**ROTARY, "num_hidden_layers": 4}
LAYERS = {key: value for key, value in THREE.items() if key != "num_key_value_heads"}
"""Without key-value heads, of families that have none."""
FINE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
ROUTED = {
    **FINE,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
ALL_HEADS = {"num_key_value_heads": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 5.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
}
SLIDES, FULL, LINEAR_ATTENTION, CONVOLUTION = "sliding_attention", "full_attention", "linear_attention", "conv"
NEMOTRON = {
    "head_dim": 16,
    "layer_norm_epsilon": 1e-3,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
}
FALCON_H1 = {
    "rms_norm_eps": 1e-3,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.6,
    "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 1.4,
    "ssm_multipliers": [0.9, 1.2, 0.7, 1.1, 0.8],
    "mlp_multipliers": [1.5, 0.6],
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
DELTA = {
    "head_dim": 16,
    "rms_norm_eps": 0.05,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
}
"""Every fourth layer attends."""
BARE = {key: value for key, value in LAYERS.items() if key != "intermediate_size"}
"""Of families with another name of the feed-forward's width."""
FALCON = {
    **BARE,
    "ffn_hidden_size": 48,
    "bias": True,
    "layer_norm_epsilon": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}
SHARED = {"num_experts": 8, "shared_expert_intermediate_size": 24}

# Soft caps are small enough to bend scores and logits of this size. Of DBRX the base of the positions is there twice:
# `transformers` reads one, a release has the other. In the mixture of Qwen 3 the first layer is dense, and of the others
# every second one. `deepseek_v3_direct` is as DeepSeek-V2-Lite has it: queries come from the residual stream itself.
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {
        **COMMON, **NO_DROPOUT, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 4,
    }),
    "llama": ("llama", {**FOUR, "rms_norm_eps": 1e-5, "rope_parameters": SCALED}),
    "qwen3": ("qwen3", {**THREE, "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "gemma2": ("gemma2", {
        **THREE, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }),
    "mixtral": ("mixtral", {**ROTARY, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {
        **ROTARY, **FINE, "num_hidden_layers": 5, "head_dim": 16, "num_experts": 8, "norm_topk_prob": False,
        "decoder_sparse_step": 2,
    }),
    "deepseek_v3": ("deepseek_v3", {
        **THREE, **ALL_HEADS, **FINE, **LATENT, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2,
        "n_group": 4, "topk_group": 2, "rope_parameters": YARN,
    }),
    "deepseek_v3_direct": ("deepseek_v3", {
        **ROTARY, **ALL_HEADS, **LATENT, "q_lora_rank": None, "num_hidden_layers": 2, "first_k_dense_replace": 2,
        "rope_interleave": False,
    }),
    "dbrx": ("dbrx", {
        **COMMON, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 500.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": None},
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }),
    "mamba2": ("mamba2", {
        **COMMON, "hidden_size": 32, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16,
        "tie_word_embeddings": True,
    }),
    "bamba": ("bamba", {
        **ROTARY, "num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16,
    }),
    "qwen2": ("qwen2", {**THREE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2_moe": ("qwen2_moe", {
        **ROTARY, **FINE, "num_hidden_layers": 3, "num_experts": 8, "shared_expert_intermediate_size": 24,
        "norm_topk_prob": True, "mlp_only_layers": [0], "layer_types": [FULL] * 3,
    }),
    "mistral": ("mistral", {**THREE, "head_dim": 16, "sliding_window": 8}),
    "ministral": ("ministral", {**FOUR, "head_dim": 16, "sliding_window": 8, "layer_types": [SLIDES, FULL] * 2}),
    "ministral3": ("ministral3", {**THREE, "head_dim": 16, "sliding_window": None, "rope_parameters": GROWING}),
    "gemma": ("gemma", {**THREE, "head_dim": 16}),
    "gemma3_text": ("gemma3_text", {
        **FOUR, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24,
        "layer_types": [SLIDES, SLIDES, SLIDES, FULL],
        "rope_parameters": {FULL: LINEAR, SLIDES: {"rope_type": "default", "rope_theta": 50.0}},
        "final_logit_softcapping": 3.0,
    }),
    "vaultgemma": ("vaultgemma", {
        **FOUR, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    }),
    "phi3": ("phi3", {**THREE, "sliding_window": 8, "rope_parameters": HALF}),
    "phi3_long": ("phi3", {**THREE, "original_max_position_embeddings": 32, "rope_parameters": LONG}),
    "glm": ("glm", {**THREE, "head_dim": 16, "attention_bias": True}),
    "glm4": ("glm4", {**THREE, "head_dim": 16, "attention_bias": True}),
    "glm4_moe": ("glm4_moe", {**THREE, **ROUTED, "head_dim": 16, "attention_bias": True, "use_qk_norm": True}),
    "glm4_moe_lite": ("glm4_moe_lite", {
        **THREE, **ALL_HEADS, **ROUTED, **LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"],
    }),
    "solar_open": ("solar_open", {**THREE, **ROUTED, "head_dim": 16}),
    "dots1": ("dots1", {
        **THREE, **ROUTED, "head_dim": 16, "sliding_window": 8, "max_window_layers": 1, "first_k_dense_replace": 1,
        "norm_topk_prob": True, "attention_bias": True,
    }),
    "deepseek_v2": ("deepseek_v2", {
        **THREE, **ALL_HEADS, **ROUTED, **LATENT, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy",
    }),
    "deepseek_v2_lite": ("deepseek_v2", {
        **THREE, **ALL_HEADS, **ROUTED, **LATENT, "q_lora_rank": None, "topk_method": "greedy",
        "n_group": None, "topk_group": None,
    }),
    "youtu": ("youtu", {**THREE, **ALL_HEADS, **LATENT}),
    "seed_oss": ("seed_oss", {
        **THREE, "head_dim": 16, "attention_bias": True, "attention_out_bias": True,
        "attention_dropout": 0.0, "residual_dropout": 0.0,
    }),
    "ernie4_5": ("ernie4_5", {**THREE, "head_dim": 16}),
    "helium": ("helium", {**THREE, "head_dim": 8}),
    "cwm": ("cwm", {
        **FOUR, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 16, "sliding_window": 8,
        "rope_parameters": SCALED,
    }),
    "arcee": ("arcee", {**THREE, "attention_bias": True, "rope_parameters": DYNAMIC}),
    "starcoder2": ("starcoder2", {**THREE, "sliding_window": 8}),
    "gpt_bigcode": ("gpt_bigcode", {
        **COMMON, **NO_DROPOUT, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4,
    }),
    "gpt_neox": ("gpt_neox", {**LAYERS, "rope_parameters": HALF}),
    "gpt_neox_sequential": ("gpt_neox", {**LAYERS, "use_parallel_residual": False, "tie_word_embeddings": True}),
    "stablelm": ("stablelm", {**THREE, "use_qkv_bias": True}),
    "stablelm_parallel": ("stablelm", {**THREE, "use_parallel_residual": True}),
    "nemotron": ("nemotron", {**THREE, "head_dim": 16}),
    "olmo": ("olmo", {**THREE, "clip_qkv": 0.4}),
    "olmo2": ("olmo2", {**THREE, "attention_bias": False}),
    "olmo3": ("olmo3", {
        **FOUR, "sliding_window": 8,
        "rope_parameters": {FULL: {**YARN, "attention_factor": 1.3}, SLIDES: {"rope_type": "default", "rope_theta": 500.0}},
    }),
    "olmoe": ("olmoe", {**THREE, "num_experts": 8, "num_experts_per_tok": 2}),
    "flex_olmo": ("flex_olmo", {**THREE, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "granite": ("granite", {
        **THREE, **MULTIPLIERS,
        "attention_bias": True,
    }),
    "gpt_oss": ("gpt_oss", {
        **FOUR, "head_dim": 16, "sliding_window": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "swiglu_limit": 0.05,
        "swiglu_alpha": 1.5, "rope_parameters": {**YARN, "mscale": 1.0, "truncate": False},
    }),
    "granitemoe": ("granitemoe", {
        **THREE, **MULTIPLIERS,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    }),
    "granitemoeshared": ("granitemoeshared", {
        **THREE, **MULTIPLIERS,
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24,
    }),
    "smollm3": ("smollm3", {**FOUR}),
    "exaone4": ("exaone4", {**FOUR, "sliding_window": 8}),
    "cohere": ("cohere", {**THREE, "use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("cohere2", {**FOUR, "sliding_window": 8, "logit_scale": 0.5}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {**THREE, "head_dim": 16}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**THREE, "head_dim": 16, "num_experts": 4, "moe_topk": 2}),
    "minimax_m2": ("minimax_m2", {**THREE, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8}),
    "ernie4_5_moe": ("ernie4_5_moe", {
        **THREE, "moe_intermediate_size": 16, "moe_k": 2, "moe_num_experts": 8, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    }),
    "internlm3": ("internlm3", {**THREE, "head_dim": 16}),
    "iquestcoder": ("iquestcoder", {**THREE, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "jais2": ("jais2", {**THREE}),
    "hyperclovax": ("hyperclovax", {**THREE, **MULTIPLIERS, "head_dim": 16, "attention_bias": True}),
    "hyperclovax_plain": ("hyperclovax", {**THREE, "use_post_norm": False}),
    "exaone_moe": ("exaone_moe", {
        **FOUR, **FINE, "sliding_window": 8, "num_experts": 8, "num_shared_experts": 2, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.7, "first_k_dense_replace": 2, "pad_token_id": None,
    }),
    "hy_v3": ("hy_v3", {
        **THREE, **FINE, "head_dim": 16, "num_experts": 8, "num_shared_experts": 2, "router_scaling_factor": 1.7,
    }),
    "qwen3_next": ("qwen3_next", {**FOUR, **FINE, **DELTA, **SHARED, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3_5_text": ("qwen3_5_text", {**FOUR, **DELTA, "tie_word_embeddings": True}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {
        **ROTARY, **FINE, **DELTA, **SHARED, "num_hidden_layers": 3, "layer_types": [LINEAR_ATTENTION, FULL, LINEAR_ATTENTION],
    }),
    "falcon": ("falcon", {**FALCON}),
    "falcon_new": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_new_shared": ("falcon", {
        **FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
    }),
    "falcon_sequential": ("falcon", {
        **FALCON, "multi_query": False, "parallel_attn": False, "tie_word_embeddings": False,
    }),
    "llama4_text": ("llama4_text", {
        **FOUR, "head_dim": 16, "intermediate_size_mlp": 40, "num_local_experts": 4, "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 7, "attn_scale": 0.5, "floor_scale": 6,
        "no_rope_layer_interval": 3, "attention_bias": True,
        "rope_parameters": SCALED,
    }),
    "nemotron_h": ("nemotron_h", {
        **{key: value for key, value in ROTARY.items() if key != "num_hidden_layers"}, **NEMOTRON,
        "layers_block_type": [LINEAR_ATTENTION, "moe", FULL, "mlp", LINEAR_ATTENTION, "moe"],
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24, "routed_scaling_factor": 1.7, "time_step_min": 0.25,
    }),
    "nemotron_h_dense": ("nemotron_h", {
        **ROTARY, **NEMOTRON, "layers_block_type": [LINEAR_ATTENTION, "mlp", FULL, "mlp"], "time_step_min": 0.5,
    }),
    "persimmon": ("persimmon", {**LAYERS, "rope_parameters": HALF}),
    "falcon_h1": ("falcon_h1", {
        **THREE, **FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
    }),
    "falcon_h1_plain": ("falcon_h1", {**THREE, **FALCON_H1, "attention_bias": True}),
    "bloom": ("bloom", {
        **COMMON, "hidden_size": 48, "n_layer": 3, "n_head": 6, "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-3,
    }),
    "mpt": ("mpt", {
        **COMMON, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 64, "attn_config": {"clip_qkv": 0.4},
    }),
    "lfm2": ("lfm2", {
        **FOUR, "layer_types": [CONVOLUTION, CONVOLUTION, FULL, CONVOLUTION], "block_multiple_of": 8, "norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }),
    "lfm2_moe": ("lfm2_moe", {
        **FOUR, **FINE, "layer_types": [CONVOLUTION, FULL] * 2, "num_dense_layers": 1, "num_experts": 8, "norm_eps": 1e-3,
        "routed_scaling_factor": 1.7, "conv_L_cache": 4,
    }),
    "opt": ("opt", {**BARE, "ffn_dim": 48, "dropout": 0.0}),
}  # fmt: skip
"""Name to a `model_type`, and the settings of its configuration."""
