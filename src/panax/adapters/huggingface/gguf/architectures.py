"""Architectures of GGUF files: how their metadata maps to config.json, and their tensors' names to Hugging Face's.

Sources: `gguf` 0.19 (constants and tensor mappings), and llama.cpp's conversion of these models: Llama's queries and keys are
stored with the two halves of each head's features interleaved, and Gemma's norms with 1 added.
"""

from collections.abc import Mapping
from typing import NamedTuple

_ATTENTION = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.bias": "self_attn.o_proj.bias",
}
_HEAD_NORMS = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}
_DENSE = {
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_PRE = {"ffn_norm.weight": "post_attention_layernorm.weight"}
_BOTH_SIDES = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""Tensors outside of the layers, theirs to Hugging Face's."""

_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}


class ExpertNames(NamedTuple):
    """Names of a mixture's tensors: in a layer, and Hugging Face's with "{expert}"."""

    router: str
    gate: str
    up: str
    down: str


class Architecture(NamedTuple):
    """One architecture of GGUF files.

    Attributes:
        name: Value of `general.architecture`.
        model_type: Of config.json.
        inside: Names of a layer's tensors in GGUF to Hugging Face's.
        keys: Metadata after the name and a dot, to keys of config.json.
        interleaved: True if queries and keys have the halves of each head interleaved.
        norm_offset: Number that is added to norms' scales.
        experts: Names of the experts' tensors, for a mixture.
    """

    name: str
    model_type: str
    inside: Mapping[str, str]
    keys: Mapping[str, str] = _KEYS
    interleaved: bool = False
    norm_offset: float = 0.0
    experts: ExpertNames | None = None


_GEMMA_KEYS = {**_KEYS, "attention.sliding_window": "sliding_window"}

_MOE_KEYS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}

ARCHITECTURES = (
    Architecture("llama", "llama", _ATTENTION | _DENSE | _PRE, interleaved=True),
    Architecture("llama", "mistral", _ATTENTION | _DENSE | _PRE, interleaved=True),
    Architecture(
        "llama",
        "mixtral",
        _ATTENTION | _PRE,
        {**_KEYS, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        interleaved=True,
        experts=ExpertNames(
            "block_sparse_moe.gate.weight",
            "block_sparse_moe.experts.{expert}.w1.weight",
            "block_sparse_moe.experts.{expert}.w3.weight",
            "block_sparse_moe.experts.{expert}.w2.weight",
        ),
    ),
    Architecture("qwen2", "qwen2", _ATTENTION | _DENSE | _PRE),
    Architecture("qwen3", "qwen3", _ATTENTION | _HEAD_NORMS | _DENSE | _PRE),
    Architecture(
        "qwen3moe",
        "qwen3_moe",
        _ATTENTION | _HEAD_NORMS | _PRE,
        {**_KEYS, **_MOE_KEYS, "expert_feed_forward_length": "moe_intermediate_size"},
        experts=ExpertNames(
            "mlp.gate.weight",
            "mlp.experts.{expert}.gate_proj.weight",
            "mlp.experts.{expert}.up_proj.weight",
            "mlp.experts.{expert}.down_proj.weight",
        ),
    ),
    Architecture(
        "gemma2",
        "gemma2",
        _ATTENTION | _DENSE | _BOTH_SIDES,
        {
            **_GEMMA_KEYS,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        norm_offset=1.0,
    ),
    Architecture(
        "gemma3", "gemma3_text", _ATTENTION | _HEAD_NORMS | _DENSE | _BOTH_SIDES, _GEMMA_KEYS, norm_offset=1.0
    ),
)
"""The first one of a name is read, unless the file has experts."""
