"""GPT-2; StarCoder, which differs in one key-value head for all queries; and gpt-oss, a mixture with attention sinks.

Sources: the modeling and configuration files of `transformers` 5.23 (gpt2, gpt_bigcode, gpt_oss), and the released
configurations.
"""

import re
from collections.abc import Mapping
from typing import Any

from ....layers import GateClamp
from ....models import DecoderConfig
from ..family import Family, MoEMapping, RefuseFn
from ..json_values import is_json
from ..rotary_positions import PLACES, RotaryMapping
from ..sliding_windows import every_nth_full
from ..tensor_names import MULTI_HEAD, PRE_NORMS, ROTARY_ABSENT, ROTARY_KEYS, map_weights, rotary_weights, without

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

_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}

_CLAMP = {"slope": "swiglu_alpha", "limit": "swiglu_limit"}
"""Config key of each field of `GateClamp`."""

_EXPERTS = "mlp.experts"


def _long_positions(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    """Fill in the positions that `transformers` computes if config.json has none."""
    if any(raw.get(place) is not None for place in PLACES):
        return raw
    return {**raw, "rope_parameters": {**_YARN, "original_max_position_embeddings": 4096, "rope_theta": 150_000.0}}


def _read_clamp(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    bounds = {ours: raw.get(theirs, getattr(GateClamp(), ours)) for ours, theirs in _CLAMP.items()}
    for ours, theirs in _CLAMP.items():
        if not is_json(bounds[ours], float) or not bounds[ours] > 0:
            refuse(theirs, "expected a positive number")
    return {"gate_clamp": GateClamp(**{ours: float(value) for ours, value in bounds.items()})}


def _write_clamp(config: DecoderConfig) -> tuple[dict[str, Any], list[str]]:
    if config.gate_clamp is None:
        return {}, ["model.gate_clamp=None, expected bounds of the gates"]
    # The key is required though nothing reads it.
    return {theirs: getattr(config.gate_clamp, ours) for ours, theirs in _CLAMP.items()} | {"hidden_act": "silu"}, []


GPT_OSS = Family(
    model_type="gpt_oss",
    title="gpt-oss",
    architecture="GptOssForCausalLM",
    fields={"activation": "silu", "attention_sinks": True},
    keys=without(ROTARY_KEYS, "activation"),
    only={"hidden_act": ("silu",)},
    absent={**ROTARY_ABSENT, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True},
    rotary=RotaryMapping(theta=150_000.0),
    windows=every_nth_full(2, absent=128),
    weights=rotary_weights(
        PRE_NORMS,
        {
            **MULTI_HEAD,
            "attention.sinks": ("self_attn.sinks", "heads"),
            "feed_forward.router.w": ("mlp.router.weight", "router embed"),
            "feed_forward.router.b": ("mlp.router.bias", "router"),
            # Gate and up take turns along the last dimension.
            "feed_forward.experts.w_gate": (f"{_EXPERTS}.gate_up_proj", "expert embed (expert_ffn 2)", 0),
            "feed_forward.experts.w_up": (f"{_EXPERTS}.gate_up_proj", "expert embed (expert_ffn 2)", 1),
            "feed_forward.experts.w_down": (f"{_EXPERTS}.down_proj", "expert expert_ffn embed"),
            "feed_forward.experts.b_gate": (f"{_EXPERTS}.gate_up_proj_bias", "expert (expert_ffn 2)", 0),
            "feed_forward.experts.b_up": (f"{_EXPERTS}.gate_up_proj_bias", "expert (expert_ffn 2)", 1),
            "feed_forward.experts.b_down": (f"{_EXPERTS}.down_proj_bias", "router embed"),
        },
    ),
    mixture=MoEMapping(
        # The softmax is over the chosen experts: over all of them, divided by the sum of the chosen.
        always={"ffn": 0, "logit_bias": True, "expert_biases": True},
        keys={"experts": "num_local_experts", "active": "num_experts_per_tok"},
        absent={"num_local_experts": 128, "num_experts_per_tok": 4},
        other_names={"num_local_experts": "num_experts"},
    ),
    complete=_long_positions,
    computed=("gate_clamp",),
    read=_read_clamp,
    write=_write_clamp,
)

FAMILIES = (GPT2, GPT_BIGCODE, GPT_OSS)
