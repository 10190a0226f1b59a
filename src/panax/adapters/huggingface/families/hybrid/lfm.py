"""LFM2, with and without experts: short convolutions, and attention in some layers.

Sources: the modeling and configuration files of `transformers` 5.23 (lfm2, lfm2_moe), its conversion of weights, and the
released configurations.
"""

from collections.abc import Mapping
from typing import Any

from .....models import ConvolutionConfig
from ...family import Family, MoEMapping, RefuseFn, TensorSource
from ...json_values import WrittenConfig, is_json
from ...pattern import Pattern
from ...rotary_positions import RotaryMapping
from ...tensor_names import ROTARY_ABSENT, ROTARY_KEYS, map_weights, without

FULL, CONVOLUTION = "full_attention", "conv"
"""Values of `layer_types`."""

_MOST_LAYERS = 10_000
"""Models of more layers are refused, whatever kinds these are of."""

_RENAMED = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
"""Keys of the releases, which count before those of `transformers`."""


def _complete(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    return {**raw, **{theirs: raw[key] for key, theirs in _RENAMED.items() if key in raw}}


def _read_layers(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    count, kinds = raw["num_hidden_layers"], raw.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in (FULL, CONVOLUTION) for kind in kinds):
        refuse("layer_types", f"expected a list of {count}, {FULL!r} or {CONVOLUTION!r} for each layer")
    return {"attention_layers": tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)}


def _write_layers(config: ConvolutionConfig) -> WrittenConfig:
    attending = set(config.attention_layers)
    return {"layer_types": [FULL if i in attending else CONVOLUTION for i in range(config.num_layers)]}, []


def _list_layers(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    """Read `full_attn_idxs`, the indices of attention layers, if there is no list of kinds; without either all attend."""
    raw, count = _complete(raw, refuse), raw["num_hidden_layers"]
    if raw.get("layer_types") is not None or not is_json(count, int) or count > _MOST_LAYERS:
        return raw
    indices = raw.get("full_attn_idxs")
    if indices is not None and not (isinstance(indices, list) and all(is_json(each, int) for each in indices)):
        refuse("full_attn_idxs", "expected a list of layers")
    kinds = [FULL if indices is None or layer in indices else CONVOLUTION for layer in range(count)]
    return {**raw, "layer_types": kinds}


def _read_dense(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    """Read the layers, and the feed-forward's width, of which two thirds count, rounded up to a multiple."""
    width, adjusted = raw.get("intermediate_size", 12288), raw.get("block_auto_adjust_ff_dim", True)
    factor, multiple = raw.get("block_ffn_dim_multiplier", 1.0), raw.get("block_multiple_of", 256)
    for key, value, kind in (
        ("intermediate_size", width, int),
        ("block_auto_adjust_ff_dim", adjusted, bool),
        ("block_ffn_dim_multiplier", 1.0 if factor is None else factor, float),
        ("block_multiple_of", multiple, int),
    ):
        if not is_json(value, kind) or (kind is int and value <= 0):
            refuse(key, f"expected a value of type {kind.__name__}" + (", above 0" if kind is int else ""))
    if adjusted:
        width = int(2 * width / 3)
        # Without a multiplier it is not rounded up.
        width = width if factor is None else multiple * -(-int(factor * width) // multiple)
    return {"ffn": width, **_read_layers(raw, refuse)}


def _write_dense(config: ConvolutionConfig) -> WrittenConfig:
    raw, problems = _write_layers(config)
    return {**raw, "intermediate_size": config.ffn, "block_auto_adjust_ff_dim": False}, problems


_KEYS = without(
    ROTARY_KEYS,
    "head_dim",
    "activation",
    "attention_bias",
    "attention_output_bias",
    norm_epsilon="norm_eps",
    conv_taps="conv_L_cache",
)

_ABSENT = {
    **ROTARY_ABSENT,
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "tie_word_embeddings": True,
}

_ONLY = {"conv_bias": (False,)}

_OUTSIDE = {
    "embedding.table": ("embed_tokens.weight", "vocab embed"),
    "final_norm.scale": ("embedding_norm.weight", "norm"),
}

_INSIDE = {
    "mixer_norm.scale": ("operator_norm.weight", "norm"),
    "attention_norm.scale": ("operator_norm.weight", "norm"),
    "feed_forward_norm.scale": ("ffn_norm.weight", "norm"),
    **{f"mixer.w_{name}": ("conv.in_proj.weight", "(3 conv_channel) embed", at) for at, name in enumerate("bcx")},
    "mixer.conv": ("conv.conv.weight", "conv_channel 1 tap"),
    "mixer.w_o": ("conv.out_proj.weight", "embed conv_channel"),
    "attention.w_q": ("self_attn.q_proj.weight", "(heads head_dim) embed"),
    "attention.w_k": ("self_attn.k_proj.weight", "(kv_heads head_dim) embed"),
    "attention.w_v": ("self_attn.v_proj.weight", "(kv_heads head_dim) embed"),
    "attention.w_o": ("self_attn.out_proj.weight", "embed (heads head_dim)"),
    "attention.q_norm.scale": ("self_attn.q_layernorm.weight", "norm"),
    "attention.k_norm.scale": ("self_attn.k_layernorm.weight", "norm"),
    "feed_forward.w_gate": ("feed_forward.w1.weight", "ffn embed"),
    "feed_forward.w_up": ("feed_forward.w3.weight", "ffn embed"),
    "feed_forward.w_down": ("feed_forward.w2.weight", "embed ffn"),
}

_EXPERTS = {
    "feed_forward.router.w": ("feed_forward.gate.weight", "router embed"),
    "feed_forward.experts.w_gate": ("feed_forward.experts.{expert}.w1.weight", "expert_ffn embed"),
    "feed_forward.experts.w_up": ("feed_forward.experts.{expert}.w3.weight", "expert_ffn embed"),
    "feed_forward.experts.w_down": ("feed_forward.experts.{expert}.w2.weight", "embed expert_ffn"),
}

LFM2 = Family(
    model_type="lfm2",
    title="LFM2",
    architecture="Lfm2ForCausalLM",
    fields={"qk_norm": True},
    keys=without(_KEYS, "ffn"),
    absent=_ABSENT,
    read_keys=(
        *_RENAMED,
        "full_attn_idxs",
        "block_auto_adjust_ff_dim",
        "block_ffn_dim_multiplier",
        "block_multiple_of",
    ),
    only=_ONLY,
    rotary=RotaryMapping(theta=1_000_000.0),
    weights=map_weights("model.", _OUTSIDE, _INSIDE),
    config=ConvolutionConfig,
    complete=_list_layers,
    computed=("attention_layers", "ffn"),
    read=_read_dense,
    write=_write_dense,
    whole_heads=True,
)

LFM2_MOE = Family(
    model_type="lfm2_moe",
    title="LFM2 mixture of experts",
    architecture="Lfm2MoeForCausalLM",
    fields={"qk_norm": True},
    keys=_KEYS,
    absent=_ABSENT,
    read_keys=tuple(_RENAMED),
    only=_ONLY,
    rotary=RotaryMapping(theta=1_000_000.0),
    weights=map_weights("model.", _OUTSIDE, _INSIDE | _EXPERTS),
    mixture=MoEMapping(
        always={"scores": "sigmoid", "topk_epsilon": 1e-6},
        keys={
            "experts": "num_experts",
            "active": "num_experts_per_tok",
            "ffn": "moe_intermediate_size",
            "first_dense": "num_dense_layers",
            "normalize_topk": "norm_topk_prob",
            "scale": "routed_scaling_factor",
            "selection_bias": "use_expert_bias",
        },
        absent={
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
        },
        bias=TensorSource("model.layers.{layer}.feed_forward.expert_bias", Pattern("router")),
    ),
    config=ConvolutionConfig,
    complete=_complete,
    computed=("attention_layers",),
    read=_read_layers,
    write=_write_layers,
    whole_heads=True,
)

FAMILIES = (LFM2, LFM2_MOE)
