"""Mistral, Ministral and Mixtral.

Sources: the modeling and configuration files of `transformers` 5.23 (mistral, ministral, ministral3, mixtral), its
conversion of weights, and the released configurations.
"""

from ..family import Family, MoEMapping
from ..rotary_positions import RotaryMapping
from ..sliding_windows import WindowMapping
from ..tensor_names import (
    MULTI_HEAD,
    PRE_NORMS,
    ROTARY_ABSENT,
    ROTARY_KEYS,
    experts,
    rotary_weights,
    without,
)

_KEYS = without(ROTARY_KEYS, "attention_bias", "attention_output_bias")

MISTRAL = Family(
    model_type="mistral",
    title="Mistral",
    architecture="MistralForCausalLM",
    keys=_KEYS,
    absent={**ROTARY_ABSENT, "num_key_value_heads": 8},
    rotary=RotaryMapping(),
    windows=WindowMapping(absent=4096, listed=False),
    weights=rotary_weights(PRE_NORMS),
)

MINISTRAL = Family(
    model_type="ministral",
    title="Ministral",
    architecture="MinistralForCausalLM",
    keys=_KEYS,
    absent={**ROTARY_ABSENT, "num_key_value_heads": 8},
    rotary=RotaryMapping(),
    windows=WindowMapping(absent=4096),
    weights=rotary_weights(PRE_NORMS),
)

MINISTRAL3 = Family(
    model_type="ministral3",
    title="Ministral 3",
    architecture="Ministral3ForCausalLM",
    keys=_KEYS,
    absent={**ROTARY_ABSENT, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    rotary=RotaryMapping(grows=True),
    windows=WindowMapping(listed=False),
    weights=rotary_weights(PRE_NORMS),
)

MIXTRAL = Family(
    model_type="mixtral",
    title="Mixtral",
    architecture="MixtralForCausalLM",
    keys=_KEYS,
    absent={**ROTARY_ABSENT, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    rotary=RotaryMapping(theta=1_000_000.0),
    windows=WindowMapping(listed=False),
    weights=rotary_weights(PRE_NORMS, MULTI_HEAD | experts("block_sparse_moe", "w1", "w3", "w2")),
    mixture=MoEMapping(
        always={"ffn": 0},
        keys={"experts": "num_local_experts", "active": "num_experts_per_tok"},
        absent={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    whole_heads=True,
)

FAMILIES = (MISTRAL, MIXTRAL, MINISTRAL, MINISTRAL3)
