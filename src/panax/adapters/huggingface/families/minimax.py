"""MiniMax M2: queries and keys are normalized over all heads, and rotated in part.

Sources: the modeling and configuration files of `transformers` 5.23 (minimax_m2), its conversion of weights, and the
released configurations.
"""

from collections.abc import Mapping
from typing import Any

from ..family import Family, MoEMapping, RefuseFn, TensorSource
from ..json_values import is_json
from ..pattern import Pattern
from ..rotary_positions import PARTIAL_ROTARY_KEY, RotaryMapping
from ..tensor_names import (
    MULTI_HEAD,
    PRE_NORMS,
    ROTARY_ABSENT,
    ROTARY_KEYS,
    experts,
    own_scales,
    rotary_weights,
    without,
)


def _rotated_part(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    """Read `rotary_dim`, the number of rotated features of a head."""
    width, head_dim = raw.get("rotary_dim"), raw.get("head_dim", 128)
    if width is None:
        return raw
    if not is_json(width, int) or not is_json(head_dim, int) or head_dim <= 0:
        refuse("rotary_dim", "expected a number of features, of which head_dim are a head's")
    return {PARTIAL_ROTARY_KEY: width / head_dim, **raw}


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    title="MiniMax M2",
    architecture="MiniMaxM2ForCausalLM",
    fields={"qk_norm": True, "qk_norm_scope": "all_heads"},
    keys=without(ROTARY_KEYS, "attention_bias", "attention_output_bias"),
    absent={**ROTARY_ABSENT, "num_key_value_heads": 8, "head_dim": 128},
    only={"scoring_func": ("sigmoid",), "shared_intermediate_size": (0,)},
    rotary=RotaryMapping(theta=5_000_000.0, fraction=1.0),
    weights=rotary_weights(
        PRE_NORMS,
        MULTI_HEAD
        | experts("block_sparse_moe", "w1", "w3", "w2")
        | own_scales("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    ),
    mixture=MoEMapping(
        always={"ffn": 0, "scores": "sigmoid", "selection_bias": True},
        keys={"experts": "num_local_experts", "active": "num_experts_per_tok"},
        absent={"num_local_experts": 256, "num_experts_per_tok": 8},
        bias=TensorSource("model.layers.{layer}.block_sparse_moe.e_score_correction_bias", Pattern("router")),
    ),
    complete=_rotated_part,
)

FAMILIES = (MINIMAX_M2,)
