"""OPT: learned positions from the third row of their table on, and layer norms with biases.

Sources: the modeling and configuration files of `transformers` 5.23 (opt), and the released configurations. OPT-350M is
refused: it normalizes after each branch is added, and its embedding is narrower than its layers.
"""

from collections.abc import Mapping
from typing import Any

from .....models import DecoderConfig
from ...family import Family, RefuseFn
from ...json_values import WrittenConfig
from ...tensor_names import map_weights, with_biases

_OFFSET = 2
"""Rows of the table of positions before the first one: OPT's ids of positions began after the padding's."""


def _check_width(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    if raw.get("word_embed_proj_dim") not in (None, raw.get("hidden_size")):
        refuse("word_embed_proj_dim", f"expected hidden_size={raw.get('hidden_size')}, or none")
    return raw


def _write(config: DecoderConfig) -> WrittenConfig:
    return {"word_embed_proj_dim": config.embed, "dropout": config.dropout, "attention_dropout": 0.0}, []


OPT = Family(
    model_type="opt",
    title="OPT",
    architecture="OPTForCausalLM",
    prefix="model.decoder.",
    # The epsilon of PyTorch's LayerNorm, which is built without one.
    fields={"norm": "layer", "norm_epsilon": 1e-5, "gated": False, "rotary": None, "position_offset": _OFFSET},
    keys={
        "vocab_size": "vocab_size",
        "max_length": "max_position_embeddings",
        "embed": "hidden_size",
        "num_layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "ffn": "ffn_dim",
        "activation": "activation_function",
        "attention_bias": "enable_bias",
        "attention_output_bias": "enable_bias",
        "feed_forward_bias": "enable_bias",
        "tied": "tie_word_embeddings",
    },
    absent={
        "max_position_embeddings": 2048,
        "activation_function": "relu",
        "enable_bias": True,
        "tie_word_embeddings": True,
    },
    only={
        "do_layer_norm_before": (True,),
        "_remove_final_layer_norm": (False,),
        "layer_norm_elementwise_affine": (True,),
    },
    weights=map_weights(
        "model.decoder.",
        {
            "embedding.table": ("embed_tokens.weight", "vocab embed"),
            "positions.table": ("embed_positions.weight", "position embed"),
            **with_biases({"final_norm.scale": ("final_layer_norm.weight", "norm")}),
        },
        {
            **with_biases(
                {
                    "attention_norm.scale": ("self_attn_layer_norm.weight", "norm"),
                    "feed_forward_norm.scale": ("final_layer_norm.weight", "norm"),
                }
            ),
            "attention.w_q": ("self_attn.q_proj.weight", "(heads head_dim) embed"),
            "attention.w_k": ("self_attn.k_proj.weight", "(kv_heads head_dim) embed"),
            "attention.w_v": ("self_attn.v_proj.weight", "(kv_heads head_dim) embed"),
            "attention.w_o": ("self_attn.out_proj.weight", "embed (heads head_dim)"),
            "attention.b_q": ("self_attn.q_proj.bias", "(heads head_dim)"),
            "attention.b_k": ("self_attn.k_proj.bias", "(kv_heads head_dim)"),
            "attention.b_v": ("self_attn.v_proj.bias", "(kv_heads head_dim)"),
            "attention.b_o": ("self_attn.out_proj.bias", "norm"),
            "feed_forward.w_up": ("fc1.weight", "ffn embed"),
            "feed_forward.b_up": ("fc1.bias", "ffn"),
            "feed_forward.w_down": ("fc2.weight", "embed ffn"),
            "feed_forward.b_down": ("fc2.bias", "norm"),
        },
    ),
    read_keys=("word_embed_proj_dim",),
    complete=_check_width,
    write=_write,
    whole_heads=True,
)

FAMILIES = (OPT,)
