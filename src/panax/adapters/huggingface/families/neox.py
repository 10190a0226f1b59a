"""GPT-NeoX and Pythia, StableLM, StarCoder 2, Nemotron 4, Jais 2 and Persimmon: layer norms with biases.

Sources: the modeling and configuration files of `transformers` 5.23 (gpt_neox, stablelm, starcoder2, nemotron, jais2,
persimmon), and the released configurations.
"""

from ..family import Family
from ..rotary_positions import RotaryMapping
from ..sliding_windows import ONE_WINDOW
from ..tensor_names import (
    GATED,
    MULTI_HEAD,
    ROTARY_ABSENT,
    ROTARY_KEYS,
    map_weights,
    with_biases,
    without,
)

_NORMS = with_biases(
    {
        "attention_norm.scale": ("input_layernorm.weight", "norm"),
        "feed_forward_norm.scale": ("post_attention_layernorm.weight", "norm"),
    }
)

_PLAIN = {
    "feed_forward.w_up": ("mlp.up_proj.weight", "ffn embed"),
    "feed_forward.b_up": ("mlp.up_proj.bias", "ffn"),
    "feed_forward.w_down": ("mlp.down_proj.weight", "embed ffn"),
    "feed_forward.b_down": ("mlp.down_proj.bias", "norm"),
}
"""A feed-forward without a gate."""

_OUTSIDE = {
    "embedding.table": ("embed_tokens.weight", "vocab embed"),
    **with_biases({"final_norm.scale": ("norm.weight", "norm")}),
}

_FOUR_TIMES = {
    "feed_forward.w_up": ("mlp.dense_h_to_4h.weight", "ffn embed"),
    "feed_forward.b_up": ("mlp.dense_h_to_4h.bias", "ffn"),
    "feed_forward.w_down": ("mlp.dense_4h_to_h.weight", "embed ffn"),
    "feed_forward.b_down": ("mlp.dense_4h_to_h.bias", "norm"),
}
"""The same, with the names of the first of these families."""


def _fused_heads(start: str) -> dict[str, tuple]:
    """Return the sources of an attention's parameters: for each head its query, key and value in one tensor."""
    axes = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}
    fused = f"{start}.query_key_value"
    return {
        **{
            f"attention.w_{name}": (f"{fused}.weight", f"({axis} 3 head_dim) embed", part)
            for part, (name, axis) in enumerate(axes.items())
        },
        **{
            f"attention.b_{name}": (f"{fused}.bias", f"({axis} 3 head_dim)", part)
            for part, (name, axis) in enumerate(axes.items())
        },
        "attention.w_o": (f"{start}.dense.weight", "embed (heads head_dim)"),
        "attention.b_o": (f"{start}.dense.bias", "norm"),
    }


GPT_NEOX = Family(
    model_type="gpt_neox",
    title="GPT-NeoX and Pythia",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    fields={"norm": "layer", "gated": False, "feed_forward_bias": True},
    keys=without(
        ROTARY_KEYS,
        "kv_heads",
        "head_dim",
        norm_epsilon="layer_norm_eps",
        parallel_residual="use_parallel_residual",
    ),
    absent={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "attention_bias": True,
    },
    rotary=RotaryMapping(theta_key="rotary_emb_base", fraction=0.25, fraction_key="rotary_pct"),
    weights=map_weights(
        "gpt_neox.",
        {
            "embedding.table": ("embed_in.weight", "vocab embed"),
            **with_biases({"final_norm.scale": ("final_layer_norm.weight", "norm")}),
        },
        {
            **_NORMS,
            **_fused_heads("attention"),
            **_FOUR_TIMES,
        },
        head="embed_out.weight",
    ),
    whole_heads=True,
)

STABLELM = Family(
    model_type="stablelm",
    title="StableLM",
    architecture="StableLmForCausalLM",
    fields={"norm": "layer"},
    keys=without(
        ROTARY_KEYS,
        "head_dim",
        "attention_output_bias",
        norm_epsilon="layer_norm_eps",
        attention_bias="use_qkv_bias",
        parallel_residual="use_parallel_residual",
        shared_norm="use_parallel_residual",
    ),
    absent={**ROTARY_ABSENT, "layer_norm_eps": 1e-5, "use_qkv_bias": False, "use_parallel_residual": False},
    only={"qk_layernorm": (False,)},
    rotary=RotaryMapping(fraction=0.25, fraction_key="rope_pct"),
    weights=map_weights("model.", _OUTSIDE, {**_NORMS, **MULTI_HEAD, **GATED}),
)

STARCODER2 = Family(
    model_type="starcoder2",
    title="StarCoder 2",
    architecture="Starcoder2ForCausalLM",
    fields={"norm": "layer", "gated": False},
    keys=without(
        ROTARY_KEYS,
        "head_dim",
        norm_epsilon="norm_epsilon",
        attention_bias="use_bias",
        attention_output_bias="use_bias",
        feed_forward_bias="use_bias",
    ),
    absent={
        **ROTARY_ABSENT,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    rotary=RotaryMapping(),
    windows=ONE_WINDOW,
    weights=map_weights(
        "model.",
        _OUTSIDE,
        {
            **_NORMS,
            **MULTI_HEAD,
            "feed_forward.w_up": ("mlp.c_fc.weight", "ffn embed"),
            "feed_forward.b_up": ("mlp.c_fc.bias", "ffn"),
            "feed_forward.w_down": ("mlp.c_proj.weight", "embed ffn"),
            "feed_forward.b_down": ("mlp.c_proj.bias", "norm"),
        },
    ),
)

NEMOTRON = Family(
    model_type="nemotron",
    title="Nemotron 4 and Minitron",
    architecture="NemotronForCausalLM",
    fields={"norm": "layer", "norm_unit_offset": True, "gated": False},
    keys={**ROTARY_KEYS, "norm_epsilon": "norm_eps", "feed_forward_bias": "mlp_bias"},
    absent={**ROTARY_ABSENT, "norm_eps": 1e-5, "hidden_act": "relu2", "mlp_bias": False},
    rotary=RotaryMapping(fraction=0.5),
    weights=map_weights(
        "model.",
        _OUTSIDE,
        {**_NORMS, **MULTI_HEAD, **_PLAIN},
    ),
)

JAIS2 = Family(
    model_type="jais2",
    title="Jais 2",
    architecture="Jais2ForCausalLM",
    fields={"norm": "layer", "gated": False},
    keys={**ROTARY_KEYS, "norm_epsilon": "layer_norm_eps", "feed_forward_bias": "mlp_bias"},
    absent={**ROTARY_ABSENT, "layer_norm_eps": 1e-5, "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
    rotary=RotaryMapping(),
    weights=map_weights("model.", _OUTSIDE, {**_NORMS, **MULTI_HEAD, **_PLAIN}),
    whole_heads=True,
)

PERSIMMON = Family(
    model_type="persimmon",
    title="Persimmon",
    architecture="PersimmonForCausalLM",
    fields={
        "norm": "layer",
        "gated": False,
        "attention_bias": True,
        "attention_output_bias": True,
        "feed_forward_bias": True,
    },
    keys=without(
        ROTARY_KEYS,
        "kv_heads",
        "head_dim",
        "attention_bias",
        "attention_output_bias",
        norm_epsilon="layer_norm_eps",
        qk_norm="qk_layernorm",
    ),
    absent={
        "max_position_embeddings": 16384,
        "hidden_act": "relu2",
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "qk_layernorm": True,
    },
    rotary=RotaryMapping(fraction=0.5),
    weights=map_weights(
        "model.",
        {
            "embedding.table": ("embed_tokens.weight", "vocab embed"),
            **with_biases({"final_norm.scale": ("final_layernorm.weight", "norm")}),
        },
        {
            **_NORMS,
            **_fused_heads("self_attn"),
            **with_biases(
                {
                    "attention.q_norm.scale": ("self_attn.q_layernorm.weight", "norm"),
                    "attention.k_norm.scale": ("self_attn.k_layernorm.weight", "norm"),
                }
            ),
            **_FOUR_TIMES,
        },
    ),
    whole_heads=True,
)

FAMILIES = (GPT_NEOX, STABLELM, STARCODER2, NEMOTRON, JAIS2, PERSIMMON)
