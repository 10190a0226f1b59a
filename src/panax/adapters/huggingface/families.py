"""The families of models as tables: which key of config.json and which tensor is which of ours.

Each line is read in both directions, by loading and by saving.

Sources: the modelling and configuration files of `transformers` 5.23 (gpt2, llama, qwen3, gemma2), and the
configurations that were released with the models; the keys that versions before 5 wrote are read as well.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from .pattern import Pattern

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
"""Activations, theirs to ours."""

SCALING_KEYS = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
"""The fields of `RotaryScaling`, ours to theirs."""

HEAD = "lm_head.weight"
"""The head's name in every family."""


class Foreign(NamedTuple):
    """Where a parameter is in the files.

    Attributes:
        name: Of the tensor, with "{layer}" where the layer's number stands.
        pattern: What its dimensions are made of.
        part: Which of the concatenated parameters, where the pattern holds a number.
    """

    name: str
    pattern: Pattern
    part: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of `transformers`, and the part of `DecoderConfig` that it expresses.

    Attributes:
        prefix: What all names but the head's begin with; files of the bare model leave it out.
        always: Fields of `DecoderConfig` that have this value in every member.
        keys: Field to the key of config.json that means the same. A field in neither table is derived from others.
        absent: What `transformers` takes for a key that config.json leaves out.
        only: Keys that change what is computed, and the values of them that the decoder computes.
        activation_names: Ours to theirs, where it is not the one that most families write.
        windowed: Has `sliding_window` and `layer_types`.
        whole_heads: `transformers` refuses a member whose heads don't divide its width, even with a `head_dim`.
        weights: Parameter name, "layers." standing for a block's place in its stack, to where it is.
        buffers: Tensors of this name are no parameters; older files hold them.
    """

    model_type: str
    architecture: str
    prefix: str
    always: Mapping[str, Any]
    keys: Mapping[str, str]
    absent: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    weights: Mapping[str, Foreign]
    activation_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    windowed: bool = False
    whole_heads: bool = True
    buffers: re.Pattern = re.compile(r"\.rotary_emb\.inv_freq$")


PLAIN = {
    "norm_unit_offset": False,
    "post_norms": False,
    "attention_soft_cap": None,
    "logit_soft_cap": None,
    "embed_scale": False,
}
ROTARY = {"norm": "rms", "gated": True, "feed_forward_bias": False}
"""What all families with rotary embedding share."""

ROTARY_KEYS = {
    "vocab_size": "vocab_size",
    "max_length": "max_position_embeddings",
    "embed": "hidden_size",
    "num_layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "activation": "hidden_act",
    "norm_epsilon": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "attention_output_bias": "attention_bias",
    "tied": "tie_word_embeddings",
}

ROTARY_ABSENT = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def _weights(prefix: str, outside: Mapping[str, tuple], inside: Mapping[str, tuple]) -> dict[str, Foreign]:
    def foreign(start: str, name: str, pattern: str, part: int = 0) -> Foreign:
        return Foreign(start + name, Pattern(pattern), part)

    blocks = f"{prefix}{'h' if prefix == 'transformer.' else 'layers'}.{{layer}}."
    return {
        **{ours: foreign(prefix, *theirs) for ours, theirs in outside.items()},
        **{f"layers.{ours}": foreign(blocks, *theirs) for ours, theirs in inside.items()},
        "head.table": Foreign(HEAD, Pattern("vocab embed")),
    }


def _rotary_weights(norms: Mapping[str, str]) -> dict[str, Foreign]:
    """The names that Llama introduced; families differ in what they call their norms."""
    return _weights(
        "model.",
        {"embedding.table": ("embed_tokens.weight", "vocab embed"), "final_norm.scale": ("norm.weight", "norm")},
        {
            **{ours: (theirs, "norm") for ours, theirs in norms.items()},
            "attention.w_q": ("self_attn.q_proj.weight", "(heads head_dim) embed"),
            "attention.w_k": ("self_attn.k_proj.weight", "(kv_heads head_dim) embed"),
            "attention.w_v": ("self_attn.v_proj.weight", "(kv_heads head_dim) embed"),
            "attention.w_o": ("self_attn.o_proj.weight", "embed (heads head_dim)"),
            "attention.b_q": ("self_attn.q_proj.bias", "(heads head_dim)"),
            "attention.b_k": ("self_attn.k_proj.bias", "(kv_heads head_dim)"),
            "attention.b_v": ("self_attn.v_proj.bias", "(kv_heads head_dim)"),
            "attention.b_o": ("self_attn.o_proj.bias", "norm"),
            "feed_forward.w_gate": ("mlp.gate_proj.weight", "ffn embed"),
            "feed_forward.w_up": ("mlp.up_proj.weight", "ffn embed"),
            "feed_forward.w_down": ("mlp.down_proj.weight", "embed ffn"),
        },
    )


PRE_NORMS = {
    "attention_norm.scale": "input_layernorm.weight",
    "feed_forward_norm.scale": "post_attention_layernorm.weight",
}

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    always={
        **PLAIN,
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
    weights=_weights(
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
    ),
    buffers=re.compile(r"\.attn\.(masked_)?bias$"),
)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    always={**PLAIN, **ROTARY, "qk_norm": False},
    keys=ROTARY_KEYS,
    absent=ROTARY_ABSENT,
    only={"mlp_bias": (False,)},
    weights=_rotary_weights(PRE_NORMS),
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    prefix="model.",
    always={**PLAIN, **ROTARY, "qk_norm": True},
    keys=ROTARY_KEYS,
    absent={**ROTARY_ABSENT, "head_dim": 128},
    only={},
    weights=_rotary_weights(
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
    architecture="Gemma2ForCausalLM",
    prefix="model.",
    always={**ROTARY, "qk_norm": False, "norm_unit_offset": True, "post_norms": True, "embed_scale": True},
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
    },
    only={"use_bidirectional_attention": (None, False)},
    weights=_rotary_weights(
        {
            "attention_norm.scale": "input_layernorm.weight",
            "attention_post_norm.scale": "post_attention_layernorm.weight",
            "feed_forward_norm.scale": "pre_feedforward_layernorm.weight",
            "feed_forward_post_norm.scale": "post_feedforward_layernorm.weight",
        }
    ),
    windowed=True,
)

FAMILIES: Mapping[str, Family] = {family.model_type: family for family in (GPT2, LLAMA, QWEN3, GEMMA2)}
