"""Names and patterns of tensors that many families share."""

from collections.abc import Mapping

from .family import HEAD_NAME, TensorSource
from .pattern import Pattern

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
"""Fields, and the keys that Llama introduced."""

ROTARY_ABSENT = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
"""Their defaults."""

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

FUSED_HEADS = {
    "attention.w_q": ("self_attn.qkv_proj.weight", "(heads+kv_heads+kv_heads head_dim) embed", 0),
    "attention.w_k": ("self_attn.qkv_proj.weight", "(heads+kv_heads+kv_heads head_dim) embed", 1),
    "attention.w_v": ("self_attn.qkv_proj.weight", "(heads+kv_heads+kv_heads head_dim) embed", 2),
    "attention.w_o": ("self_attn.o_proj.weight", "embed (heads head_dim)"),
}

GATED = {
    "feed_forward.w_gate": ("mlp.gate_proj.weight", "ffn embed"),
    "feed_forward.w_up": ("mlp.up_proj.weight", "ffn embed"),
    "feed_forward.w_down": ("mlp.down_proj.weight", "embed ffn"),
}

FUSED_GATE = {
    "feed_forward.w_gate": ("mlp.gate_up_proj.weight", "(2 ffn) embed", 0),
    "feed_forward.w_up": ("mlp.gate_up_proj.weight", "(2 ffn) embed", 1),
    "feed_forward.w_down": ("mlp.down_proj.weight", "embed ffn"),
}

PRE_NORMS = {
    "attention_norm.scale": "input_layernorm.weight",
    "feed_forward_norm.scale": "post_attention_layernorm.weight",
}

POST_NORMS = {
    "attention_post_norm.scale": "post_attention_layernorm.weight",
    "feed_forward_post_norm.scale": "post_feedforward_layernorm.weight",
}

QK_NORMS = {
    "attention.q_norm.scale": "self_attn.q_norm.weight",
    "attention.k_norm.scale": "self_attn.k_norm.weight",
}

OUTSIDE = {"embedding.table": ("embed_tokens.weight", "vocab embed"), "final_norm.scale": ("norm.weight", "norm")}
"""Parameters outside of the layers."""


def own_scales(q: str, k: str) -> dict[str, tuple]:
    """Return the scales of norms over all heads, or over each head separately, from the names of their tensors."""
    return {"attention.q_scale": (q, "(heads head_dim)"), "attention.k_scale": (k, "(kv_heads head_dim)")}


def experts(start: str, gate: str, up: str, down: str, router: str = "gate") -> dict[str, tuple[str, str]]:
    """Return the experts' parameters, with a tensor for each expert, and the router's."""
    return {
        "feed_forward.router.w": (f"{start}.{router}.weight", "router embed"),
        "feed_forward.experts.w_gate": (f"{start}.experts.{{expert}}.{gate}.weight", "expert_ffn embed"),
        "feed_forward.experts.w_up": (f"{start}.experts.{{expert}}.{up}.weight", "expert_ffn embed"),
        "feed_forward.experts.w_down": (f"{start}.experts.{{expert}}.{down}.weight", "embed expert_ffn"),
    }


EXPERTS = experts("mlp", "gate_proj", "up_proj", "down_proj")
"""The most common names."""


def shared_expert(start: str) -> dict[str, tuple[str, str]]:
    """Return the shared expert's parameters."""
    return {
        "feed_forward.shared.w_gate": (f"{start}.gate_proj.weight", "ffn embed"),
        "feed_forward.shared.w_up": (f"{start}.up_proj.weight", "ffn embed"),
        "feed_forward.shared.w_down": (f"{start}.down_proj.weight", "embed ffn"),
    }


def without(keys: Mapping[str, str], *fields: str, **more: str) -> dict[str, str]:
    """Return keys without some fields, and with others."""
    return {field: key for field, key in keys.items() if field not in fields} | more


def map_weights(
    prefix: str,
    outside: Mapping[str, tuple],
    inside: Mapping[str, tuple],
    blocks: str = "layers",
    head: str = HEAD_NAME,
) -> dict[str, TensorSource]:
    """Return the sources of all parameters, from names after `prefix`, and after the number in `blocks`."""

    def foreign(start: str, name: str, pattern: str | Pattern, part: int = 0) -> TensorSource:
        return TensorSource(start + name, Pattern(pattern) if isinstance(pattern, str) else pattern, part)

    return {
        **{ours: foreign(prefix, *theirs) for ours, theirs in outside.items()},
        **{f"layers.{ours}": foreign(f"{prefix}{blocks}.{{layer}}.", *theirs) for ours, theirs in inside.items()},
        "head.table": TensorSource(head, Pattern("vocab embed")),
    }


def rotary_weights(
    norms: Mapping[str, str], inside: Mapping[str, tuple] = MULTI_HEAD | GATED
) -> dict[str, TensorSource]:
    """Return sources with the names that Llama introduced; families differ in the names of norms, and in a layer's
    other parameters."""
    return map_weights("model.", OUTSIDE, {**{ours: (theirs, "norm") for ours, theirs in norms.items()}, **inside})


def with_biases(norms: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Return layer norms' scales with their biases, from names that end in `.weight`."""
    return {
        **norms,
        **{
            ours.removesuffix("scale") + "bias": (theirs.removesuffix("weight") + "bias", axes)
            for ours, (theirs, axes) in norms.items()
        },
    }
