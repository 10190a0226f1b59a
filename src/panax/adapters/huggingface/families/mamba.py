"""Families with state-space layers: Mamba-2 with these alone, Bamba with attention in some layers.

Sources: the modeling and configuration files of `transformers` 5.23 (mamba2, bamba), and the released
configurations. Keys that concern rounding and speed (`chunk_size`, `residual_in_fp32`) or initialization
(`time_step_min`, ...) are ignored: the residual stream is in the task's `compute_dtype`.
"""

import math
from collections.abc import Mapping
from typing import Any

from ....models import HybridConfig
from ..family import Family, RefuseFn
from ..json_values import is_json
from ..rotary_positions import RotaryMapping
from ..tensor_names import GATED, MULTI_HEAD, ROTARY_ABSENT, ROTARY_KEYS, map_weights, without

UNBOUNDED = tuple([0.0, infinity] for infinity in (math.inf, {"__float__": "Infinity"}))
"""Time-step limits of unlimited length, as older and newer versions write them."""

_INPUTS = "(ssm_heads ssm_head_dim|ssm_groups ssm_state|ssm_groups ssm_state)"
_PROJECTED = f"(ssm_heads ssm_head_dim|{_INPUTS[1:-1]}|ssm_heads) embed"


def map_mixer(start: str) -> dict[str, tuple]:
    """Return the sources of a mixer's parameters; input projection and convolution are one tensor each."""
    projections = {f"mixer.w_{name}": part for part, name in enumerate(("z", "x", "b", "c", "dt"))}
    inputs = {name: part for part, name in enumerate(("x", "b", "c"))}
    return {
        **{ours: (f"{start}.in_proj.weight", _PROJECTED, part) for ours, part in projections.items()},
        **{f"mixer.conv_{name}": (f"{start}.conv1d.weight", f"{_INPUTS} 1 tap", part) for name, part in inputs.items()},
        **{f"mixer.conv_bias_{name}": (f"{start}.conv1d.bias", _INPUTS, part) for name, part in inputs.items()},
        "mixer.dt_bias": (f"{start}.dt_bias", "ssm_heads"),
        "mixer.a_log": (f"{start}.A_log", "ssm_heads"),
        "mixer.d": (f"{start}.D", "ssm_heads"),
        "mixer.scale": (f"{start}.norm.weight", "(ssm_heads ssm_head_dim)"),
        "mixer.w_o": (f"{start}.out_proj.weight", "embed (ssm_heads ssm_head_dim)"),
    }


def _expansion(config: HybridConfig) -> tuple[int, list[str]]:
    """Return the inner width as a multiple of the outer one, and the problem if it is not a multiple."""
    inner = config.ssm_heads * config.ssm_head_dim
    expand, rest = divmod(inner, config.embed)
    wrong = f"model.ssm_heads * ssm_head_dim={inner}, expected a multiple of embed={config.embed}"
    return expand, [wrong] if rest or not expand else []


def _check_expansion(raw: Mapping[str, Any], key: str, inner: int, refuse: RefuseFn) -> None:
    expand = raw.get(key, 2)
    if not is_json(expand, float) or expand * raw["hidden_size"] != inner:
        refuse(key, f"times hidden_size={raw['hidden_size']!r} is not the {inner} features of all heads")


def _read_mamba2(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    _check_expansion(raw, "expand", raw.get("num_heads", 128) * raw.get("head_dim", 64), refuse)
    return {"max_length": 1 << 20}


def _write_mamba2(config: HybridConfig) -> tuple[dict[str, Any], list[str]]:
    expand, problems = _expansion(config)
    return {"expand": expand}, problems


MAMBA2 = Family(
    model_type="mamba2",
    title="Mamba-2",
    architecture="Mamba2ForCausalLM",
    prefix="backbone.",
    keys={
        "vocab_size": "vocab_size",
        "embed": "hidden_size",
        "num_layers": "num_hidden_layers",
        "norm_epsilon": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
        "ssm_heads": "num_heads",
        "ssm_head_dim": "head_dim",
        "ssm_groups": "n_groups",
        "ssm_state": "state_size",
        "conv_taps": "conv_kernel",
        "conv_bias": "use_conv_bias",
    },
    absent={
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
    },
    only={"use_bias": (False,), "hidden_act": ("silu", "swish"), "time_step_limit": UNBOUNDED},
    weights=map_weights(
        "backbone.",
        {"embedding.table": ("embeddings.weight", "vocab embed"), "final_norm.scale": ("norm_f.weight", "norm")},
        {"mixer_norm.scale": ("norm.weight", "norm"), **map_mixer("mixer")},
    ),
    config=HybridConfig,
    read=_read_mamba2,
    write=_write_mamba2,
    computed=("max_length",),
)


def _read_bamba(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    embed, heads = raw["hidden_size"], raw.get("mamba_n_heads", 128)
    width = raw.get("mamba_d_head", "auto")
    if width == "auto":
        expand = raw.get("mamba_expand", 2)
        width = expand * embed // max(heads, 1) if is_json(expand, int) else None
    if not is_json(width, int):
        refuse("mamba_d_head", "expected a whole number, or 'auto'")
    _check_expansion(raw, "mamba_expand", heads * width, refuse)
    if raw.get("head_dim") not in (None, embed // raw["num_attention_heads"]):
        refuse("head_dim", f"expected hidden_size / num_attention_heads={embed // raw['num_attention_heads']}")
    layers = raw.get("attn_layer_indices") or []
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        refuse("attn_layer_indices", "expected a list of layers")
    return {"attention_layers": tuple(sorted(set(layers))), "ssm_head_dim": width}


def _write_bamba(config: HybridConfig) -> tuple[dict[str, Any], list[str]]:
    expand, problems = _expansion(config)
    if not config.attention_layers:
        problems.append("model.attention_layers=(), expected some attention layers")
    layers, width = list(config.attention_layers), config.ssm_head_dim
    return {"mamba_expand": expand, "mamba_d_head": width, "attn_layer_indices": layers}, problems


BAMBA = Family(
    model_type="bamba",
    title="Bamba",
    architecture="BambaForCausalLM",
    keys={
        **without(ROTARY_KEYS, "head_dim"),
        "ssm_heads": "mamba_n_heads",
        "ssm_groups": "mamba_n_groups",
        "ssm_state": "mamba_d_state",
        "conv_taps": "mamba_d_conv",
        "conv_bias": "mamba_conv_bias",
    },
    absent={
        **ROTARY_ABSENT,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
    },
    # The mixer's convolution and gate take silu; the dense layers of the same model would take another.
    only={
        "mlp_bias": (False,),
        "mamba_proj_bias": (False,),
        "time_step_limit": UNBOUNDED,
        "hidden_act": ("silu", "swish"),
    },
    weights=map_weights(
        "model.",
        {
            "embedding.table": ("embed_tokens.weight", "vocab embed"),
            "final_norm.scale": ("final_layernorm.weight", "norm"),
        },
        {
            "mixer_norm.scale": ("input_layernorm.weight", "norm"),
            "attention_norm.scale": ("input_layernorm.weight", "norm"),
            "feed_forward_norm.scale": ("pre_ff_layernorm.weight", "norm"),
            **map_mixer("mamba"),
            **MULTI_HEAD,
            **{ours: (theirs.replace("mlp.", "feed_forward."), axes) for ours, (theirs, axes) in GATED.items()},
        },
    ),
    rotary=RotaryMapping(fraction=0.5, inside_only=True, scalings=("default",)),
    config=HybridConfig,
    computed=("attention_layers", "ssm_head_dim"),
    read=_read_bamba,
    write=_write_bamba,
    whole_heads=True,
)

FAMILIES = (MAMBA2, BAMBA)
