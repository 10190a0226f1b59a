"""Families of dense models as tables; each line is used in both directions, by loading and by saving.

Sources: the modelling and configuration files of `transformers` 5.23 (gpt2, llama, qwen3, gemma2), and the
configurations that were released with the models; the keys that versions before 5 wrote are read as well.
"""

import re

from .family import (
    DENSE_FIELDS,
    PLAIN_FIELDS,
    PRE_NORMS,
    ROTARY,
    ROTARY_ABSENT,
    ROTARY_KEYS,
    Family,
    map_weights,
    rotary_weights,
)

GPT2 = Family(
    model_type="gpt2",
    title="GPT-2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    always={
        **DENSE_FIELDS,
        **PLAIN_FIELDS,
        "norm": "layer",
        "gated": False,
        "qk_norm": False,
        "attention_bias": True,
        "attention_output_bias": True,
        "feed_forward_bias": True,
        "rotary": None,
    },
    keys={
        "vocab_size": "vocab_size",
        "max_length": "n_positions",
        "embed": "n_embd",
        "num_layers": "n_layer",
        "heads": "n_head",
        "ffn": "n_inner",
        "activation": "activation_function",
        "norm_epsilon": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
    },
    absent={
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    activation_names={"gelu_tanh": "gelu_new"},
    # `transformers` stores these matrices input first, as ours are.
    weights=map_weights(
        "transformer.",
        {
            "embedding.table": ("wte.weight", "vocab embed"),
            "positions.table": ("wpe.weight", "position embed"),
            "final_norm.scale": ("ln_f.weight", "norm"),
            "final_norm.bias": ("ln_f.bias", "norm"),
        },
        {
            "attention_norm.scale": ("ln_1.weight", "norm"),
            "attention_norm.bias": ("ln_1.bias", "norm"),
            "attention.w_q": ("attn.c_attn.weight", "embed (3 heads head_dim)", 0),
            "attention.w_k": ("attn.c_attn.weight", "embed (3 kv_heads head_dim)", 1),
            "attention.w_v": ("attn.c_attn.weight", "embed (3 kv_heads head_dim)", 2),
            "attention.w_o": ("attn.c_proj.weight", "(heads head_dim) embed"),
            "attention.b_q": ("attn.c_attn.bias", "(3 heads head_dim)", 0),
            "attention.b_k": ("attn.c_attn.bias", "(3 kv_heads head_dim)", 1),
            "attention.b_v": ("attn.c_attn.bias", "(3 kv_heads head_dim)", 2),
            "attention.b_o": ("attn.c_proj.bias", "norm"),
            "feed_forward_norm.scale": ("ln_2.weight", "norm"),
            "feed_forward_norm.bias": ("ln_2.bias", "norm"),
            "feed_forward.w_up": ("mlp.c_fc.weight", "embed ffn"),
            "feed_forward.b_up": ("mlp.c_fc.bias", "ffn"),
            "feed_forward.w_down": ("mlp.c_proj.weight", "ffn embed"),
            "feed_forward.b_down": ("mlp.c_proj.bias", "norm"),
        },
        blocks="h",
    ),
    buffers=re.compile(r"\.attn\.(masked_)?bias$"),
)

LLAMA = Family(
    model_type="llama",
    title="Llama 3",
    architecture="LlamaForCausalLM",
    prefix="model.",
    always={**DENSE_FIELDS, **PLAIN_FIELDS, **ROTARY, "qk_norm": False},
    keys=ROTARY_KEYS,
    absent=ROTARY_ABSENT,
    only={"mlp_bias": (False,)},
    weights=rotary_weights(PRE_NORMS),
)

QWEN3 = Family(
    model_type="qwen3",
    title="Qwen3",
    architecture="Qwen3ForCausalLM",
    prefix="model.",
    always={**DENSE_FIELDS, **PLAIN_FIELDS, **ROTARY, "qk_norm": True},
    keys=ROTARY_KEYS,
    absent={**ROTARY_ABSENT, "head_dim": 128},
    only={},
    weights=rotary_weights(
        {
            **PRE_NORMS,
            "attention.q_norm.scale": "self_attn.q_norm.weight",
            "attention.k_norm.scale": "self_attn.k_norm.weight",
        }
    ),
    windowed=True,
    whole_heads=False,
)

GEMMA2 = Family(
    model_type="gemma2",
    title="Gemma 2",
    architecture="Gemma2ForCausalLM",
    prefix="model.",
    always={
        **DENSE_FIELDS,
        **ROTARY,
        "qk_norm": False,
        "norm_unit_offset": True,
        "post_norms": True,
        "embed_scale": True,
    },
    keys={
        **ROTARY_KEYS,
        "activation": "hidden_activation",
        "attention_soft_cap": "attn_logit_softcapping",
        "logit_soft_cap": "final_logit_softcapping",
        "query_scale": "query_pre_attn_scalar",
    },
    absent={
        **ROTARY_ABSENT,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    only={"use_bidirectional_attention": (None, False)},
    weights=rotary_weights(
        {
            "attention_norm.scale": "input_layernorm.weight",
            "attention_post_norm.scale": "post_attention_layernorm.weight",
            "feed_forward_norm.scale": "pre_feedforward_layernorm.weight",
            "feed_forward_post_norm.scale": "post_feedforward_layernorm.weight",
        }
    ),
    windowed=True,
)

FAMILIES = (GPT2, LLAMA, QWEN3, GEMMA2)
