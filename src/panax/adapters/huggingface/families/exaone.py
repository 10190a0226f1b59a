"""EXAONE 4, with norms after the sub-layers, and K-EXAONE, with experts: rotary positions within windows only.

Sources: the modeling and configuration files of `transformers` 5.23 (exaone4, exaone_moe), and the released configurations.
"""

from collections.abc import Mapping
from typing import Any

from ..family import Family, MoEMapping, RefuseFn, TensorSource
from ..json_values import is_json
from ..layer_rotary import SlidingOnly
from ..pattern import Pattern
from ..rotary_positions import RotaryMapping
from ..sliding_windows import WindowMapping
from ..tensor_names import (
    EXPERTS,
    GATED,
    MULTI_HEAD,
    POST_NORMS,
    PRE_NORMS,
    QK_NORMS,
    ROTARY_ABSENT,
    ROTARY_KEYS,
    rotary_weights,
    without,
)
from .deepseek import GROUPED, SHARED_EXPERTS

_KEYS = without(ROTARY_KEYS, "attention_bias", "attention_output_bias")
_ABSENT = {**ROTARY_ABSENT, "rms_norm_eps": 1e-5}


def _sliding(layer: int, raw: Mapping[str, Any]) -> bool:
    """Read a pattern such as 4, or "LLLG": three local layers, then a global one."""
    pattern = raw.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern:
        return pattern[layer % len(pattern)] == "L"
    return bool((layer + 1) % pattern) if type(pattern) is int and pattern > 0 else False


EXAONE4 = Family(
    model_type="exaone4",
    title="EXAONE 4",
    architecture="Exaone4ForCausalLM",
    fields={"pre_norms": False, "post_norms": True, "qk_norm": True},
    keys=_KEYS,
    absent=_ABSENT,
    rotary=RotaryMapping(layers=SlidingOnly()),
    windows=WindowMapping(absent=4096, sliding=_sliding, keys=("sliding_window_pattern",)),
    weights=rotary_weights({**POST_NORMS, **QK_NORMS}),
)


def _sparse_layers(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    """Fill in each layer's kind, "dense" or "sparse", from the number of dense layers."""
    dense, layers = raw.get("first_k_dense_replace", 1), raw.get("num_hidden_layers", 0)
    if raw.get("mlp_layer_types") is not None or not is_json(dense, int) or not is_json(layers, int):
        return raw
    return {
        **raw,
        "mlp_layer_types": [
            "dense" if layer < dense else "sparse" for layer in range(layers if layers <= 10_000 else 0)
        ],
    }


EXAONE_MOE = Family(
    model_type="exaone_moe",
    title="K-EXAONE",
    architecture="ExaoneMoeForCausalLM",
    fields={"qk_norm": True},
    keys=_KEYS,
    absent=_ABSENT,
    rotary=RotaryMapping(layers=SlidingOnly()),
    windows=WindowMapping(absent=4096, sliding=_sliding, keys=("sliding_window_pattern",)),
    weights=rotary_weights({**PRE_NORMS, **QK_NORMS}, MULTI_HEAD | GATED | EXPERTS | SHARED_EXPERTS),
    mixture=MoEMapping(
        always=GROUPED.always,
        keys={**without(GROUPED.keys, "first_dense"), "experts": "num_experts"},
        absent={
            **GROUPED.absent,
            "num_experts": 64,
            "moe_intermediate_size": 1024,
            "n_group": 1,
            "topk_group": 1,
            "num_shared_experts": 1,
            "mlp_layer_types": 1,
        },
        shared="num_shared_experts",
        sparse="mlp_layer_types",
        bias=TensorSource("model.layers.{layer}.mlp.e_score_correction_bias", Pattern("router")),
    ),
    complete=_sparse_layers,
    predicts_more=True,
)

FAMILIES = (EXAONE4, EXAONE_MOE)
