"""Falcon: attention and feed-forward side by side with one norm or two, or one after the other.

Sources: the modeling and configuration files of `transformers` 5.23 (falcon), and the released configurations. Models with
ALiBi (Falcon-RW) are refused: `transformers` rounds their distances to bfloat16, so that positions past 256 share values.
"""

from collections.abc import Mapping
from typing import Any

from .....models import DecoderConfig
from ...family import Family, RefuseFn, TensorSource
from ...json_values import WrittenConfig, is_json
from ...pattern import GroupedPattern, Pattern
from ...rotary_positions import RotaryMapping
from ...tensor_names import map_weights, with_biases

_FLAGS = {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}
"""Keys that choose the layer's form, and their defaults."""

_HEADS = "kv_heads: heads head_dim|kv_heads head_dim|kv_heads head_dim"
"""Rows of a fused projection: for each key-value head its queries, its key and its value."""


def _read(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    """Read the layer's form: where its norms are, and the number of key-value heads."""
    flags = {key: raw.get(key, absent) for key, absent in _FLAGS.items()}
    for key, value in flags.items():
        if not isinstance(value, bool):
            refuse(key, "expected a value of type bool")
    new = flags["new_decoder_architecture"]
    if new and not flags["parallel_attn"]:
        refuse("parallel_attn", "in the new architecture the branches are parallel")
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_kv_heads")
    kv_heads = heads if kv_heads is None else kv_heads
    if not new:
        kv_heads = 1 if flags["multi_query"] else heads
    if not is_json(kv_heads, int):
        refuse("num_kv_heads", "expected a whole number")
    norms = raw.get("num_ln_in_parallel_attn")
    norms = (2 if new else 1) if norms is None else norms
    if norms not in ((1, 2) if new else (1,)):
        refuse("num_ln_in_parallel_attn", "expected 1, or 2 in the new architecture")
    parallel = flags["parallel_attn"]
    return {"kv_heads": kv_heads, "parallel_residual": parallel, "shared_norm": parallel and norms == 1}


def _write(config: DecoderConfig) -> WrittenConfig:
    """Write the older form if it has one norm and one key-value head or as many as queries, else the new one."""
    parallel, kv_heads = config.parallel_residual, config.num_kv_heads
    plain = kv_heads in (1, config.heads) and (not parallel or config.shared_norm)
    problems = []
    if not parallel and not plain:
        problems = [f"model.kv_heads={kv_heads}, expected 1 or {config.heads} without parallel_residual"]
    one = {"num_ln_in_parallel_attn": 1 if config.shared_norm or not parallel else 2}
    return {
        "new_decoder_architecture": not plain,
        "multi_query": kv_heads == 1,
        "parallel_attn": parallel,
        "num_kv_heads": kv_heads,
        **({} if plain else one),
    }, problems


def _norms(config: DecoderConfig) -> dict[str, TensorSource]:
    """Return the sources of the norms, with the names that they have in one of the three forms."""
    names = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
    if config.parallel_residual and not config.shared_norm:
        names = {"attention_norm": "ln_attn", "feed_forward_norm": "ln_mlp"}
    return {
        f"layers.{ours}.{field}": TensorSource(f"transformer.h.{{layer}}.{theirs}.{end}", Pattern("norm"))
        for ours, theirs in names.items()
        for field, end in (("scale", "weight"), ("bias", "bias"))
    }


_FUSED = {
    **{
        f"attention.w_{name}": ("self_attention.query_key_value.weight", GroupedPattern(f"({_HEADS}) embed"), part)
        for part, name in enumerate("qkv")
    },
    **{
        f"attention.b_{name}": ("self_attention.query_key_value.bias", GroupedPattern(f"({_HEADS})"), part)
        for part, name in enumerate("qkv")
    },
}

FALCON = Family(
    model_type="falcon",
    title="Falcon",
    architecture="FalconForCausalLM",
    prefix="transformer.",
    fields={"norm": "layer", "gated": False},
    keys={
        "vocab_size": "vocab_size",
        "max_length": "max_position_embeddings",
        "embed": "hidden_size",
        "num_layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "ffn": "ffn_hidden_size",
        "activation": "activation",
        "norm_epsilon": "layer_norm_epsilon",
        "attention_bias": "bias",
        "attention_output_bias": "bias",
        "feed_forward_bias": "bias",
        "tied": "tie_word_embeddings",
    },
    absent={
        "max_position_embeddings": 2048,
        "ffn_hidden_size": None,
        "activation": "gelu",
        "layer_norm_epsilon": 1e-5,
        "bias": False,
        "tie_word_embeddings": True,
    },
    only={"alibi": (False, None)},
    rotary=RotaryMapping(),
    weights=map_weights(
        "transformer.",
        {
            "embedding.table": ("word_embeddings.weight", "vocab embed"),
            **with_biases({"final_norm.scale": ("ln_f.weight", "norm")}),
        },
        {
            **_FUSED,
            "attention.w_o": ("self_attention.dense.weight", "embed (heads head_dim)"),
            "attention.b_o": ("self_attention.dense.bias", "norm"),
            "feed_forward.w_up": ("mlp.dense_h_to_4h.weight", "ffn embed"),
            "feed_forward.b_up": ("mlp.dense_h_to_4h.bias", "ffn"),
            "feed_forward.w_down": ("mlp.dense_4h_to_h.weight", "embed ffn"),
            "feed_forward.b_down": ("mlp.dense_4h_to_h.bias", "norm"),
        },
        blocks="h",
    ),
    varying=_norms,
    computed=("kv_heads", "parallel_residual", "shared_norm"),
    read_keys=("num_kv_heads", "num_ln_in_parallel_attn", *_FLAGS),
    read=_read,
    write=_write,
    whole_heads=True,
)

FAMILIES = (FALCON,)
