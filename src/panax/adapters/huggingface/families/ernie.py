"""ERNIE 4.5, with and without experts: adjacent features are rotated.

Sources: the modeling and configuration files of `transformers` 5.23 (ernie4_5, ernie4_5_moe), its conversion of weights,
and the released configurations.
"""

from collections.abc import Mapping
from typing import Any

from ..family import Family, MoEMapping, RefuseFn, TensorSource
from ..pattern import Pattern
from ..rotary_positions import RotaryMapping
from ..tensor_names import EXPERTS, GATED, MULTI_HEAD, PRE_NORMS, ROTARY_ABSENT, ROTARY_KEYS, rotary_weights, without
from .deepseek import SHARED_EXPERTS

_KEYS = without(ROTARY_KEYS, "attention_bias", "attention_output_bias")
_ABSENT = {**ROTARY_ABSENT, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}

ERNIE4_5 = Family(
    model_type="ernie4_5",
    title="ERNIE 4.5",
    architecture="Ernie4_5ForCausalLM",
    keys=_KEYS,
    absent={**_ABSENT, "num_key_value_heads": 2, "head_dim": 128},
    only={"use_bias": (False,)},
    rotary=RotaryMapping(theta=500_000.0, interleaved=True),
    weights=rotary_weights(PRE_NORMS),
)


def _check_last(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    last = raw.get("moe_layer_end_index", -1)
    if last not in (-1, None, raw.get("num_hidden_layers", 28) - 1):
        refuse("moe_layer_end_index", "expected -1, or the last layer's index")
    return raw


ERNIE4_5_MOE = Family(
    model_type="ernie4_5_moe",
    title="ERNIE 4.5 mixture of experts",
    architecture="Ernie4_5_MoeForCausalLM",
    keys=without(_KEYS, "head_dim"),
    absent={**_ABSENT, "num_key_value_heads": 4},
    only={"use_bias": (False,), "moe_norm_min": (1e-12,)},
    rotary=RotaryMapping(theta=500_000.0, interleaved=True),
    weights=rotary_weights(PRE_NORMS, MULTI_HEAD | GATED | EXPERTS | SHARED_EXPERTS),
    mixture=MoEMapping(
        always={"selection_bias": True},
        keys={
            "experts": "moe_num_experts",
            "active": "moe_k",
            "ffn": "moe_intermediate_size",
            "first_dense": "moe_layer_start_index",
            "every": "moe_layer_interval",
        },
        absent={
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
            "moe_num_shared_experts": 2,
        },
        other_names={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
        shared="moe_num_shared_experts",
        bias=TensorSource("model.layers.{layer}.mlp.moe_statics.e_score_correction_bias", Pattern("1 router")),
    ),
    complete=_check_last,
)

FAMILIES = (ERNIE4_5, ERNIE4_5_MOE)
