"""GPT-2, and StarCoder, which differs in one key-value head for all queries.

Sources: the modelling and configuration files of `transformers` 5.23 (gpt2, gpt_bigcode), and the released
configurations.
"""

import re
from typing import Any

from ....models import DecoderConfig
from ..family import Family
from ..tensor_names import map_weights

_FIELDS = {
    "norm": "layer",
    "gated": False,
    "attention_bias": True,
    "attention_output_bias": True,
    "feed_forward_bias": True,
    "rotary": None,
}

_KEYS = {
    "vocab_size": "vocab_size",
    "max_length": "n_positions",
    "embed": "n_embd",
    "num_layers": "n_layer",
    "heads": "n_head",
    "ffn": "n_inner",
    "activation": "activation_function",
    "norm_epsilon": "layer_norm_epsilon",
    "tied": "tie_word_embeddings",
}

_OUTSIDE = {
    "embedding.table": ("wte.weight", "vocab embed"),
    "positions.table": ("wpe.weight", "position embed"),
    "final_norm.scale": ("ln_f.weight", "norm"),
    "final_norm.bias": ("ln_f.bias", "norm"),
}

_NORMS = {
    "attention_norm.scale": ("ln_1.weight", "norm"),
    "attention_norm.bias": ("ln_1.bias", "norm"),
    "feed_forward_norm.scale": ("ln_2.weight", "norm"),
    "feed_forward_norm.bias": ("ln_2.bias", "norm"),
}

_BIASES = {
    "attention.b_o": ("attn.c_proj.bias", "norm"),
    "feed_forward.b_up": ("mlp.c_fc.bias", "ffn"),
    "feed_forward.b_down": ("mlp.c_proj.bias", "norm"),
}

_ONLY = {"scale_attn_weights": (True,), "add_cross_attention": (False,)}


def _write_dropout(config: DecoderConfig) -> tuple[dict[str, Any], list[str]]:
    return {"embd_pdrop": config.dropout, "resid_pdrop": config.dropout, "attn_pdrop": 0.0}, []


GPT2 = Family(
    model_type="gpt2",
    title="GPT-2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    fields=_FIELDS,
    keys=_KEYS,
    absent={
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    only={**_ONLY, "scale_attn_by_inverse_layer_idx": (False,)},
    activation_names={"gelu_tanh": "gelu_new"},
    # `transformers` stores these matrices input first, as ours are.
    weights=map_weights(
        "transformer.",
        _OUTSIDE,
        {
            **_NORMS,
            **_BIASES,
            "attention.w_q": ("attn.c_attn.weight", "embed (3 heads head_dim)", 0),
            "attention.w_k": ("attn.c_attn.weight", "embed (3 kv_heads head_dim)", 1),
            "attention.w_v": ("attn.c_attn.weight", "embed (3 kv_heads head_dim)", 2),
            "attention.w_o": ("attn.c_proj.weight", "(heads head_dim) embed"),
            "attention.b_q": ("attn.c_attn.bias", "(3 heads head_dim)", 0),
            "attention.b_k": ("attn.c_attn.bias", "(3 kv_heads head_dim)", 1),
            "attention.b_v": ("attn.c_attn.bias", "(3 kv_heads head_dim)", 2),
            "feed_forward.w_up": ("mlp.c_fc.weight", "embed ffn"),
            "feed_forward.w_down": ("mlp.c_proj.weight", "ffn embed"),
        },
        blocks="h",
    ),
    write=_write_dropout,
    whole_heads=True,
    buffers=re.compile(r"\.attn\.(masked_)?bias$"),
)

_FUSED = "(heads+kv_heads+kv_heads head_dim)"

GPT_BIGCODE = Family(
    model_type="gpt_bigcode",
    title="StarCoder",
    architecture="GPTBigCodeForCausalLM",
    prefix="transformer.",
    fields={**_FIELDS, "kv_heads": 1},
    keys=_KEYS,
    absent={
        "n_inner": None,
        "activation_function": "gelu_pytorch_tanh",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    only={**_ONLY, "multi_query": (True,)},
    weights=map_weights(
        "transformer.",
        _OUTSIDE,
        {
            **_NORMS,
            **_BIASES,
            "attention.w_q": ("attn.c_attn.weight", f"{_FUSED} embed", 0),
            "attention.w_k": ("attn.c_attn.weight", f"{_FUSED} embed", 1),
            "attention.w_v": ("attn.c_attn.weight", f"{_FUSED} embed", 2),
            "attention.w_o": ("attn.c_proj.weight", "embed (heads head_dim)"),
            "attention.b_q": ("attn.c_attn.bias", _FUSED, 0),
            "attention.b_k": ("attn.c_attn.bias", _FUSED, 1),
            "attention.b_v": ("attn.c_attn.bias", _FUSED, 2),
            "feed_forward.w_up": ("mlp.c_fc.weight", "ffn embed"),
            "feed_forward.w_down": ("mlp.c_proj.weight", "embed ffn"),
        },
        blocks="h",
    ),
    write=_write_dropout,
    whole_heads=True,
    buffers=re.compile(r"\.attn\.bias$"),
)

FAMILIES = (GPT2, GPT_BIGCODE)
