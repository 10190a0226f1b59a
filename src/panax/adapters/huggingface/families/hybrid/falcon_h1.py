"""Falcon-H1: attention and a Mamba-2 mixer side by side in each layer, and a dozen multipliers.

Sources: the modeling and configuration files of `transformers` 5.23 (falcon_h1), and the released configurations.
"""

from collections.abc import Mapping
from typing import Any

from .....models import SideBySideConfig
from ...family import Family, RefuseFn
from ...json_values import WrittenConfig, is_json
from ...rotary_positions import RotaryMapping
from ...tensor_names import GATED, MULTI_HEAD, ROTARY_ABSENT, ROTARY_KEYS, map_weights, without
from ..mamba import UNBOUNDED, map_mixer

_MULTIPLIERS = {
    "embed_multiplier": "embedding_multiplier",
    "logit_multiplier": "lm_head_multiplier",
    **{
        name: name
        for name in (
            "key_multiplier",
            "attention_in_multiplier",
            "attention_out_multiplier",
            "ssm_in_multiplier",
            "ssm_out_multiplier",
        )
    },
}
"""Fields that are one number, ours to theirs."""


def _numbers(raw: Mapping[str, Any], key: str, count: int, refuse: RefuseFn) -> tuple[float, ...]:
    values = raw.get(key)
    values = [1.0] * count if values is None else values
    if not isinstance(values, list) or len(values) != count or not all(is_json(value, float) for value in values):
        refuse(key, f"expected a list of {count} numbers")
    return tuple(float(value) for value in values)


def _read(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    embed, heads, inner = raw["hidden_size"], raw.get("mamba_n_heads", 128), raw.get("mamba_d_ssm", 1024)
    if inner is None:
        expand = raw.get("mamba_expand", 2)
        inner = expand * embed if is_json(expand, int) else None
    if not is_json(inner, int) or not is_json(heads, int) or heads <= 0 or inner % heads:
        refuse("mamba_d_ssm", f"expected a multiple of mamba_n_heads={heads!r}")
    width = raw.get("mamba_d_head", "auto")
    if width not in ("auto", inner // heads):
        refuse("mamba_d_head", f"expected 'auto', or {inner // heads}, a head's part of mamba_d_ssm")
    normed = raw.get("mamba_rms_norm", False)
    if not isinstance(normed, bool):
        refuse("mamba_rms_norm", "expected a value of type bool")
    if normed and raw.get("mamba_norm_before_gate", True):
        refuse("mamba_norm_before_gate", "the mixer normalizes after its gate")
    gate, down = _numbers(raw, "mlp_multipliers", 2, refuse)
    return {
        "ssm_head_dim": inner // heads,
        "ssm_norm": normed,
        "ssm_multipliers": _numbers(raw, "ssm_multipliers", 5, refuse),
        "gate_multiplier": gate,
        "down_multiplier": down,
    }


def _write(config: SideBySideConfig) -> WrittenConfig:
    return {
        "mamba_d_ssm": config.ssm_heads * config.ssm_head_dim,
        "mamba_d_head": config.ssm_head_dim,
        "mamba_rms_norm": config.ssm_norm,
        "mamba_norm_before_gate": False,
        "ssm_multipliers": list(config.ssm_multipliers),
        "mlp_multipliers": [config.gate_multiplier, config.down_multiplier],
    }, []


FALCON_H1 = Family(
    model_type="falcon_h1",
    title="Falcon-H1",
    architecture="FalconH1ForCausalLM",
    keys={
        **without(ROTARY_KEYS, "head_dim"),
        "ssm_heads": "mamba_n_heads",
        "ssm_groups": "mamba_n_groups",
        "ssm_state": "mamba_d_state",
        "conv_taps": "mamba_d_conv",
        "conv_bias": "mamba_conv_bias",
        **_MULTIPLIERS,
    },
    absent={
        **ROTARY_ABSENT,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
        **dict.fromkeys(_MULTIPLIERS.values(), 1.0),
    },
    # The mixer's convolution and gate take silu; the dense layers of the same model would take another.
    only={
        "mlp_bias": (False,),
        "mamba_proj_bias": (False,),
        "projectors_bias": (False,),
        "time_step_limit": UNBOUNDED,
        "hidden_act": ("silu", "swish"),
    },
    rotary=RotaryMapping(),
    weights=map_weights(
        "model.",
        {
            "embedding.table": ("embed_tokens.weight", "vocab embed"),
            "final_norm.scale": ("final_layernorm.weight", "norm"),
        },
        {
            "norm.scale": ("input_layernorm.weight", "norm"),
            "feed_forward_norm.scale": ("pre_ff_layernorm.weight", "norm"),
            **map_mixer("mamba"),
            **MULTI_HEAD,
            **{ours: (theirs.replace("mlp.", "feed_forward."), axes) for ours, (theirs, axes) in GATED.items()},
        },
    ),
    config=SideBySideConfig,
    read_keys=(
        "mamba_d_ssm",
        "mamba_rms_norm",
        "mamba_norm_before_gate",
        "mlp_multipliers",
        "ssm_multipliers",
    ),
    computed=("ssm_head_dim", "ssm_norm", "ssm_multipliers", "gate_multiplier", "down_multiplier"),
    read=_read,
    write=_write,
    whole_heads=True,
)

FAMILIES = (FALCON_H1,)
