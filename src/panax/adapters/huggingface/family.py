"""Families of models: tables that map the keys of config.json and the tensors to ours."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from ...models import DecoderConfig
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

LLAMA3_KEYS = {
    "factor": "factor",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}
"""Fields of `RotaryScaling`, ours to theirs."""

YARN_KEYS = {
    "factor": "factor",
    "original_length": "original_max_position_embeddings",
    "fast": "beta_fast",
    "slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
"""Fields of `YarnScaling`, ours to theirs."""

LATENT_KEYS = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}
"""Fields of `Latent`, ours to theirs."""

HEAD_NAME = "lm_head.weight"
"""Name of the head in every family."""


class TensorSource(NamedTuple):
    """Source of a parameter in the files.

    Attributes:
        name: The tensor's name, with "{layer}" in place of the layer's number, and "{expert}" if each expert
            has a tensor.
        pattern: How its dimensions are composed.
        part: Index among the concatenated parameters, if the pattern contains a number.
    """

    name: str
    pattern: Pattern
    part: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEMapping:
    """The part of `MoE` that a family expresses.

    Attributes:
        always: Fields of `MoE` that have this value in every member; a field in neither table has its
            default.
        keys: Field to the key of config.json with the same meaning.
        absent: Default of `transformers` for a key that config.json lacks.
        other_names: Keys that some versions of `transformers` write instead.
        values: Key to pairs of values, theirs and ours, if they are not the same.
        shared: The key with the number of shared experts, each as wide as the others.
        dense: The key with the indices of layers that are dense.
    """

    always: Mapping[str, Any]
    keys: Mapping[str, str]
    absent: Mapping[str, Any]
    other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    values: Mapping[str, tuple[tuple[Any, Any], ...]] = dataclasses.field(default_factory=dict)
    shared: str | None = None
    dense: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of `transformers`, and the part of `DecoderConfig` that it expresses.

    Attributes:
        title: Name of the models for readers.
        prefix: Prefix of all names but the head's; files of the bare model lack it.
        always: Fields of `DecoderConfig` that have this value in every member.
        keys: Field to the key of config.json with the same meaning. A field in neither table is derived from
            others.
        absent: Default of `transformers` for a key that config.json lacks.
        only: Keys that change the computation, and their values that the decoder supports.
        activation_names: Ours to theirs, if it is not the one that most families write.
        scalings: The values of `rope_type` that it has.
        mixture: Mapping of the mixture, for a family with experts.
        latent: True if it has latent attention.
        also: Other values of `model_type` with the same meaning.
        predicts_more: True if files may have layers past the last, which predict further tokens: they are
            ignored.
        nested: Keys with values that are objects; "outer.inner" is a key inside of one.
        theta: The key of the rotary base, if a release has it elsewhere than `transformers`.
        needed: Fields that may be None, but not in a member of this family.
        windowed: True if it has `sliding_window` and `layer_types`.
        whole_heads: True if `transformers` refuses a member with a width that its heads don't divide, even
            with a `head_dim`.
        weights: Parameter name, with "layers." for a block's position in its stack, to its source.
        buffers: Tensors with names that match are not parameters; older files contain them.
        config: The class of settings that it expresses, `DecoderConfig` or one that extends it.
        read: (config.json, a function that refuses a key with a reason) to the fields that the tables lack.
        write: A configuration to the keys that the tables lack, and to the problems that config.json can't
            express.
    """

    model_type: str
    title: str
    architecture: str
    prefix: str
    always: Mapping[str, Any]
    keys: Mapping[str, str]
    absent: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    weights: Mapping[str, TensorSource]
    config: type[DecoderConfig] = DecoderConfig
    read: Callable[[Mapping[str, Any], Callable[[str, str], NoReturn]], dict[str, Any]] | None = None
    write: Callable[[Any], tuple[dict[str, Any], list[str]]] | None = None
    activation_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scalings: tuple[str, ...] = ("default", "llama3")
    mixture: MoEMapping | None = None
    latent: bool = False
    also: tuple[str, ...] = ()
    predicts_more: bool = False
    nested: tuple[str, ...] = ()
    theta: str | None = None
    needed: tuple[str, ...] = ()
    windowed: bool = False
    whole_heads: bool = True
    buffers: re.Pattern = re.compile(r"\.rotary_emb\.inv_freq$")


DENSE_FIELDS = {"feed_forward": None, "latent": None, "attention_clip": None}

PLAIN_FIELDS = {
    "norm_unit_offset": False,
    "post_norms": False,
    "attention_soft_cap": None,
    "logit_soft_cap": None,
    "embed_scale": False,
}
ROTARY = {"norm": "rms", "gated": True, "feed_forward_bias": False}
"""Fields that all families with rotary embedding share."""

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


def map_weights(
    prefix: str, outside: Mapping[str, tuple], inside: Mapping[str, tuple], blocks: str = "layers"
) -> dict[str, TensorSource]:
    """Return the sources of all parameters, from names after `prefix`, and after the number in `blocks`."""

    def foreign(start: str, name: str, pattern: str, part: int = 0) -> TensorSource:
        return TensorSource(start + name, Pattern(pattern), part)

    return {
        **{ours: foreign(prefix, *theirs) for ours, theirs in outside.items()},
        **{f"layers.{ours}": foreign(f"{prefix}{blocks}.{{layer}}.", *theirs) for ours, theirs in inside.items()},
        "head.table": TensorSource(HEAD_NAME, Pattern("vocab embed")),
    }


MULTI_HEAD = {
    "attention.w_q": ("self_attn.q_proj.weight", "(heads head_dim) embed"),
    "attention.w_k": ("self_attn.k_proj.weight", "(kv_heads head_dim) embed"),
    "attention.w_v": ("self_attn.v_proj.weight", "(kv_heads head_dim) embed"),
    "attention.w_o": ("self_attn.o_proj.weight", "embed (heads head_dim)"),
    "attention.b_q": ("self_attn.q_proj.bias", "(heads head_dim)"),
    "attention.b_k": ("self_attn.k_proj.bias", "(kv_heads head_dim)"),
    "attention.b_v": ("self_attn.v_proj.bias", "(kv_heads head_dim)"),
    "attention.b_o": ("self_attn.o_proj.bias", "norm"),
}
GATED = {
    "feed_forward.w_gate": ("mlp.gate_proj.weight", "ffn embed"),
    "feed_forward.w_up": ("mlp.up_proj.weight", "ffn embed"),
    "feed_forward.w_down": ("mlp.down_proj.weight", "embed ffn"),
}
"""Parameters inside a layer, apart from norms."""

PRE_NORMS = {
    "attention_norm.scale": "input_layernorm.weight",
    "feed_forward_norm.scale": "post_attention_layernorm.weight",
}


def rotary_weights(
    norms: Mapping[str, str], inside: Mapping[str, tuple] = MULTI_HEAD | GATED
) -> dict[str, TensorSource]:
    """Return sources with the names that Llama introduced; families differ in the names of norms, and in the
    rest of a layer."""
    return map_weights(
        "model.",
        {"embedding.table": ("embed_tokens.weight", "vocab embed"), "final_norm.scale": ("norm.weight", "norm")},
        {
            **{ours: (theirs, "norm") for ours, theirs in norms.items()},
            **inside,
        },
    )
