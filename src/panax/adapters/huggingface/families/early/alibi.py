"""BLOOM and MPT: scores grow with a key's position (ALiBi).

Sources: the modeling and configuration files of `transformers` 5.23 (bloom, mpt), and the released configurations.
"""

import math
from collections.abc import Mapping
from typing import Any

from .....models import DecoderConfig
from ...family import Family, RefuseFn
from ...json_values import WrittenConfig
from ...tensor_names import map_weights, with_biases

_MOST_HEADS = 10_000


def bloom_slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes of BLOOM's heads: those of the next lower power of two, then every second one of twice as many.

    >>> bloom_slopes(2), len(bloom_slopes(6))
    ((0.0625, 0.00390625), 6)
    """
    whole = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    return (*first, *(2.0 ** (-4.0 * (i + 1) / whole) for i in range(0, 2 * (heads - whole), 2)))


def mpt_slopes(heads: int) -> tuple[float, ...]:
    """Return the slopes of MPT's heads: of the next higher power of two every second one, then the others.

    >>> mpt_slopes(2), mpt_slopes(3)[0] == mpt_slopes(4)[1]
    ((0.0625, 0.00390625), True)
    """
    whole = 1 << math.ceil(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    return tuple(slopes if whole == heads else (slopes[1::2] + slopes[::2])[:heads])


def _heads(raw: Mapping[str, Any], key: str, refuse: RefuseFn) -> int:
    heads = raw.get(key)
    if type(heads) is not int or not 0 < heads <= _MOST_HEADS:
        refuse(key, f"expected a positive number of heads, at most {_MOST_HEADS}")
    return heads


def _problems(config: DecoderConfig, slopes: tuple[float, ...]) -> list[str]:
    """Return the reasons why a family with these slopes, and feed-forwards of four times the width, is not the model's."""
    wrong = (
        [f"model.ffn={config.ffn}, expected {4 * config.embed}, four times embed"]
        if config.ffn != 4 * config.embed
        else []
    )
    return wrong if config.alibi_slopes == slopes else [*wrong, "model.alibi_slopes, expected those of the family"]


def _read_bloom(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    return {"alibi_slopes": bloom_slopes(_heads(raw, "n_head", refuse)), "ffn": 4 * raw["hidden_size"]}


def _write_bloom(config: DecoderConfig) -> WrittenConfig:
    return {"hidden_dropout": config.dropout, "attention_dropout": 0.0}, _problems(config, bloom_slopes(config.heads))


_ALIASES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"}


def _complete(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    return {**{theirs: raw[key] for key, theirs in _ALIASES.items() if key in raw}, **raw}


BLOOM = Family(
    model_type="bloom",
    title="BLOOM",
    architecture="BloomForCausalLM",
    prefix="transformer.",
    fields={
        "norm": "layer",
        "gated": False,
        "activation": "gelu_tanh",
        "attention_bias": True,
        "attention_output_bias": True,
        "feed_forward_bias": True,
        "rotary": None,
        "embed_norm": True,
    },
    keys={
        "vocab_size": "vocab_size",
        "max_length": "seq_length",
        "embed": "hidden_size",
        "num_layers": "n_layer",
        "heads": "n_head",
        "norm_epsilon": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
    },
    absent={"seq_length": 2048, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    only={"apply_residual_connection_post_layernorm": (False,)},
    weights=map_weights(
        "transformer.",
        {
            "embedding.table": ("word_embeddings.weight", "vocab embed"),
            **with_biases(
                {
                    "embedding_norm.scale": ("word_embeddings_layernorm.weight", "norm"),
                    "final_norm.scale": ("ln_f.weight", "norm"),
                }
            ),
        },
        {
            **with_biases(
                {
                    "attention_norm.scale": ("input_layernorm.weight", "norm"),
                    "feed_forward_norm.scale": ("post_attention_layernorm.weight", "norm"),
                }
            ),
            **{
                f"attention.w_{name}": ("self_attention.query_key_value.weight", f"({axis} 3 head_dim) embed", part)
                for part, (name, axis) in enumerate((("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")))
            },
            **{
                f"attention.b_{name}": ("self_attention.query_key_value.bias", f"({axis} 3 head_dim)", part)
                for part, (name, axis) in enumerate((("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")))
            },
            "attention.w_o": ("self_attention.dense.weight", "embed (heads head_dim)"),
            "attention.b_o": ("self_attention.dense.bias", "norm"),
            "feed_forward.w_up": ("mlp.dense_h_to_4h.weight", "ffn embed"),
            "feed_forward.b_up": ("mlp.dense_h_to_4h.bias", "ffn"),
            "feed_forward.w_down": ("mlp.dense_4h_to_h.weight", "embed ffn"),
            "feed_forward.b_down": ("mlp.dense_4h_to_h.bias", "norm"),
        },
        blocks="h",
    ),
    complete=_complete,
    computed=("alibi_slopes", "ffn"),
    read_keys=tuple(_ALIASES),
    read=_read_bloom,
    write=_write_bloom,
    whole_heads=True,
)


def _read_mpt(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    return {"alibi_slopes": mpt_slopes(_heads(raw, "n_heads", refuse)), "ffn": 4 * raw["d_model"]}


def _write_mpt(config: DecoderConfig) -> WrittenConfig:
    # What the first releases' own code reads, in addition to `transformers`.
    fixed = {"attn_config.alibi": True, "attn_config.alibi_bias_max": 8, "learned_pos_emb": False, "no_bias": True}
    return {**fixed, "expansion_ratio": 4}, _problems(config, mpt_slopes(config.heads))


_QKV = ("attn.Wqkv.weight", "(3 heads head_dim) embed")

MPT = Family(
    model_type="mpt",
    title="MPT",
    architecture="MptForCausalLM",
    prefix="transformer.",
    fields={"norm": "layer_unbiased", "gated": False, "activation": "gelu", "rotary": None},
    keys={
        "vocab_size": "vocab_size",
        "max_length": "max_seq_len",
        "embed": "d_model",
        "num_layers": "n_layers",
        "heads": "n_heads",
        "norm_epsilon": "layer_norm_epsilon",
        "attention_clip": "attn_config.clip_qkv",
        "tied": "tie_word_embeddings",
    },
    absent={
        "max_seq_len": 2048,
        "layer_norm_epsilon": 1e-5,
        "attn_config.clip_qkv": None,
        "tie_word_embeddings": True,
    },
    # `transformers` computes these values whatever the keys: others are other models.
    only={
        "expansion_ratio": (4,),
        "no_bias": (True,),
        "logit_scale": (None,),
        "attn_config.alibi": (True,),
        "attn_config.alibi_bias_max": (8,),
        "attn_config.attn_type": ("multihead_attention",),
        "attn_config.prefix_lm": (False,),
        "attn_config.attn_uses_sequence_id": (False,),
        "attn_config.qk_ln": (False,),
        "attn_config.softmax_scale": (None,),
    },
    weights=map_weights(
        "transformer.",
        {"embedding.table": ("wte.weight", "vocab embed"), "final_norm.scale": ("norm_f.weight", "norm")},
        {
            "attention_norm.scale": ("norm_1.weight", "norm"),
            "feed_forward_norm.scale": ("norm_2.weight", "norm"),
            "attention.w_q": (*_QKV, 0),
            "attention.w_k": ("attn.Wqkv.weight", "(3 kv_heads head_dim) embed", 1),
            "attention.w_v": ("attn.Wqkv.weight", "(3 kv_heads head_dim) embed", 2),
            "attention.w_o": ("attn.out_proj.weight", "embed (heads head_dim)"),
            "feed_forward.w_up": ("ffn.up_proj.weight", "ffn embed"),
            "feed_forward.w_down": ("ffn.down_proj.weight", "embed ffn"),
        },
        blocks="blocks",
    ),
    nested=("attn_config",),
    computed=("alibi_slopes", "ffn"),
    read=_read_mpt,
    write=_write_mpt,
    whole_heads=True,
)

FAMILIES = (BLOOM, MPT)
