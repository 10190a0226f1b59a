"""Llama 4, the text: chunks of attention, layers without positions, and experts that weigh their inputs.

Sources: the modeling and configuration files of `transformers` 5.23 (llama4), and the released configurations.
"""

from collections.abc import Mapping
from typing import Any

from .....models import DecoderConfig
from ...family import Family, MoEMapping, RefuseFn
from ...json_values import WrittenConfig
from ...layer_rotary import ListedOrGrowing
from ...rotary_positions import RotaryMapping
from ...sliding_windows import WindowMapping
from ...tensor_names import GATED, MULTI_HEAD, PRE_NORMS, ROTARY_ABSENT, ROTARY_KEYS, rotary_weights

_CHUNK = "attention_chunk_size"


def _chunked(layer: int, raw: Mapping[str, Any]) -> bool:
    """Return True for layers with rotary positions."""
    listed = raw.get("no_rope_layers")
    if isinstance(listed, list) and listed:
        return layer < len(listed) and bool(listed[layer])
    every = raw.get("no_rope_layer_interval", 4)
    return type(every) is int and every > 0 and (layer + 1) % every != 0


def _complete(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    """Read the list of mixtures as every n-th layer."""
    if raw.get(_CHUNK, 8192) is None:
        refuse(_CHUNK, "`transformers` computes no model without")
    listed, count = raw.get("moe_layers"), raw.get("num_hidden_layers")
    if listed is None or type(count) is not int:
        return raw
    first = listed[0] if isinstance(listed, list) and listed else None
    every_nth = range(first, count, first + 1) if type(first) is int and first >= 0 else range(0)
    if type(first) is not int or len(every_nth) != len(listed) or listed != list(every_nth):
        refuse("moe_layers", "expected the last of every n layers")
    return {**raw, "interleave_moe_layer_step": first + 1}


def _read_norms(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    normed = raw.get("use_qk_norm", True)
    if not isinstance(normed, bool):
        refuse("use_qk_norm", "expected a value of type bool")
    fields = {"qk_norm_scope": "unscaled", "qk_norm_layers": "rotary", "qk_norm_after_rotary": True}
    return {"qk_norm": normed, **(fields if normed else {})}


def _write(config: DecoderConfig) -> WrittenConfig:
    problems = []
    expected = {"qk_norm_scope": "unscaled", "qk_norm_layers": "rotary", "qk_norm_after_rotary": True}
    for name, value in (expected if config.qk_norm else {}).items():
        if getattr(config, name) != value:
            problems.append(f"model.{name}={getattr(config, name)!r}, expected {value!r}")
    moe = config.feed_forward
    if moe is not None and moe.shared != (moe.ffn or config.ffn):
        problems.append(f"model.feed_forward.shared={moe.shared}, expected an expert's {moe.ffn or config.ffn}")
    if not any(config.windows):
        problems.append("model.windows, expected chunks in some layers")
    every = 1 if moe is None else moe.every
    layers = list(range(every - 1, config.num_layers, every))
    return {"use_qk_norm": config.qk_norm, "moe_layers": layers, "interleave_moe_layer_step": every}, problems


LLAMA4 = Family(
    model_type="llama4_text",
    title="Llama 4",
    architecture="Llama4ForCausalLM",
    fields={"window_kind": "chunked"},
    keys={**ROTARY_KEYS, "ffn": "intermediate_size_mlp"},
    absent={
        **ROTARY_ABSENT,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "intermediate_size_mlp": 16384,
    },
    rotary=RotaryMapping(theta=500_000.0, interleaved=True, layers=ListedOrGrowing()),
    windows=WindowMapping(
        absent=8192,
        sliding=_chunked,
        keys=("no_rope_layers", "no_rope_layer_interval"),
        length_key=_CHUNK,
        word="chunked_attention",
    ),
    weights=rotary_weights(
        PRE_NORMS,
        {
            **MULTI_HEAD,
            **{ours: (theirs.replace("mlp.", "feed_forward."), axes) for ours, (theirs, axes) in GATED.items()},
            "feed_forward.router.w": ("feed_forward.router.weight", "router embed"),
            "feed_forward.experts.w_gate": ("feed_forward.experts.gate_up_proj", "expert embed (2 expert_ffn)", 0),
            "feed_forward.experts.w_up": ("feed_forward.experts.gate_up_proj", "expert embed (2 expert_ffn)", 1),
            "feed_forward.experts.w_down": ("feed_forward.experts.down_proj", "expert expert_ffn embed"),
            "feed_forward.shared.w_gate": ("feed_forward.shared_expert.gate_proj.weight", "ffn embed"),
            "feed_forward.shared.w_up": ("feed_forward.shared_expert.up_proj.weight", "ffn embed"),
            "feed_forward.shared.w_down": ("feed_forward.shared_expert.down_proj.weight", "embed ffn"),
        },
    ),
    mixture=MoEMapping(
        always={"scores": "sigmoid", "normalize_topk": False, "weigh": "input"},
        keys={
            "experts": "num_local_experts",
            "active": "num_experts_per_tok",
            "every": "interleave_moe_layer_step",
            "ffn": "intermediate_size",
            "shared": "intermediate_size",
        },
        absent={
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "intermediate_size": 8192,
        },
        other_names={"num_local_experts": "num_experts"},
    ),
    complete=_complete,
    read_keys=("moe_layers", "use_qk_norm"),
    computed=("qk_norm", "qk_norm_scope", "qk_norm_layers", "qk_norm_after_rotary"),
    read=_read_norms,
    write=_write,
)

FAMILIES = (LLAMA4,)
