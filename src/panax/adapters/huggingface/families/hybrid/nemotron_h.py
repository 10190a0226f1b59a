"""Nemotron-H and Nemotron 3: each layer is a Mamba-2 mixer, attention without positions, a feed-forward, or experts.

Sources: the modeling and configuration files of `transformers` 5.23 (nemotron_h), its conversion of weights, and the released
configurations. Experts in a latent (`moe_latent_size`) are refused. Layers that predict further tokens (`mtp.`) are not
computed, as in `transformers`; they are exported unchanged.
"""

import re
from collections.abc import Mapping
from typing import Any

from .....models import SublayerConfig
from ...family import Family, MoEMapping, RefuseFn, TensorSource
from ...json_values import WrittenConfig
from ...pattern import Pattern
from ...tensor_names import map_weights
from ..mamba import UNBOUNDED, map_mixer

_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
"""Letters of `hybrid_override_pattern`."""

_SUBLAYERS = {
    "linear_attention": "state_space",
    "full_attention": "attention",
    "mlp": "feed_forward",
    "moe": "mixture",
}
"""Values of `layers_block_type`, theirs to ours."""

_RENAMED = {"mamba": "linear_attention", "attention": "full_attention"}
"""Older values."""

_OLDER = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
"""Older keys, which count before the newer ones."""

_LAYERS = "layers_block_type"


def _complete(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    """Read the layers' kinds in each of their forms, and count them."""
    raw = {**raw, **{key: raw[older] for older, key in _OLDER.items() if older in raw}}
    kinds, letters = raw.get(_LAYERS) or raw.get("layer_types"), raw.get("hybrid_override_pattern")
    if kinds is None and letters is not None:
        if not isinstance(letters, str) or not set(letters) <= _PATTERN.keys():
            refuse("hybrid_override_pattern", f"expected letters of {''.join(_PATTERN)}")
        kinds = [_PATTERN[letter] for letter in letters]
    kinds = ["linear_attention", "moe", "full_attention", "mlp"] if kinds is None else kinds
    if not isinstance(kinds, list) or not kinds or not all(isinstance(kind, str) for kind in kinds):
        refuse(_LAYERS, "expected a list of words")
    kinds = [_RENAMED.get(kind, kind) for kind in kinds]
    if not set(kinds) <= _SUBLAYERS.keys():
        refuse(_LAYERS, f"expected {', '.join(_SUBLAYERS)}")
    return {**raw, _LAYERS: kinds, "num_hidden_layers": len(kinds)}


def _read(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    sublayers = tuple(_SUBLAYERS[kind] for kind in raw[_LAYERS])
    return {"sublayers": sublayers} | ({} if "mixture" in sublayers else {"feed_forward": None})


def _write(config: SublayerConfig) -> WrittenConfig:
    names = {ours: theirs for theirs, ours in _SUBLAYERS.items()}
    return {_LAYERS: [names[name] for name in config.sublayers], "mlp_bias": False}, []


_EXPERTS = "mixer.experts.{expert}"

NEMOTRON_H = Family(
    model_type="nemotron_h",
    title="Nemotron-H and Nemotron 3",
    architecture="NemotronHForCausalLM",
    prefix="backbone.",
    fields={"gated": False, "rotary": None},
    keys={
        "vocab_size": "vocab_size",
        "max_length": "max_position_embeddings",
        "embed": "hidden_size",
        "num_layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "ffn": "intermediate_size",
        "activation": "mlp_hidden_act",
        "norm_epsilon": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
        "ssm_heads": "mamba_num_heads",
        "ssm_head_dim": "mamba_head_dim",
        "ssm_groups": "n_groups",
        "ssm_state": "ssm_state_size",
        "conv_taps": "conv_kernel",
        "conv_bias": "use_conv_bias",
        "ssm_step_floor": "time_step_min",
    },
    absent={
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_min": 0.001,
    },
    read_keys=("hybrid_override_pattern", "layer_types", *_OLDER),
    only={
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_bias": (False,),
        "mamba_proj_bias": (False,),
        "mamba_hidden_act": ("silu", "swish"),
        "moe_latent_size": (None,),
        "time_step_limit": UNBOUNDED,
    },
    weights=map_weights(
        "backbone.",
        {"embedding.table": ("embeddings.weight", "vocab embed"), "final_norm.scale": ("norm_f.weight", "norm")},
        {
            "mixer_norm.scale": ("norm.weight", "norm"),
            "norm.scale": ("norm.weight", "norm"),
            **map_mixer("mixer"),
            "sublayer.w_q": ("mixer.q_proj.weight", "(heads head_dim) embed"),
            "sublayer.w_k": ("mixer.k_proj.weight", "(kv_heads head_dim) embed"),
            "sublayer.w_v": ("mixer.v_proj.weight", "(kv_heads head_dim) embed"),
            "sublayer.w_o": ("mixer.o_proj.weight", "embed (heads head_dim)"),
            "sublayer.w_up": ("mixer.up_proj.weight", "ffn embed"),
            "sublayer.w_down": ("mixer.down_proj.weight", "embed ffn"),
            "sublayer.router.w": ("mixer.gate.weight", "router embed"),
            "sublayer.experts.w_up": (f"{_EXPERTS}.up_proj.weight", "expert_ffn embed"),
            "sublayer.experts.w_down": (f"{_EXPERTS}.down_proj.weight", "embed expert_ffn"),
            "sublayer.shared.w_up": ("mixer.shared_experts.up_proj.weight", "ffn embed"),
            "sublayer.shared.w_down": ("mixer.shared_experts.down_proj.weight", "embed ffn"),
        },
    ),
    mixture=MoEMapping(
        always={"scores": "sigmoid", "selection_bias": True, "gated": False},
        keys={
            "experts": "n_routed_experts",
            "active": "num_experts_per_tok",
            "ffn": "moe_intermediate_size",
            "shared": "moe_shared_expert_intermediate_size",
            "normalize_topk": "norm_topk_prob",
            "scale": "routed_scaling_factor",
            "groups": "n_group",
            "active_groups": "topk_group",
        },
        absent={
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        other_names={"n_routed_experts": "num_local_experts"},
        optional=True,
        bias=TensorSource("backbone.layers.{layer}.mixer.gate.e_score_correction_bias", Pattern("router")),
    ),
    config=SublayerConfig,
    complete=_complete,
    computed=("sublayers",),
    read=_read,
    write=_write,
    carried=re.compile(r"^mtp\."),
)

FAMILIES = (NEMOTRON_H,)
