"""OLMo 1 to 3, OLMoE and FlexOlmo: norms without parameters, then norms after the sub-layers and over all heads.

Sources: the modeling and configuration files of `transformers` 5.23 (olmo, olmo2, olmo3, olmoe, flex_olmo), its conversion
of weights, and the released configurations.
"""

from ..family import Family, MoEMapping
from ..layer_rotary import ByLayerType
from ..rotary_positions import RotaryMapping
from ..sliding_windows import every_nth_full
from ..tensor_names import (
    EXPERTS,
    GATED,
    MULTI_HEAD,
    POST_NORMS,
    PRE_NORMS,
    ROTARY_ABSENT,
    ROTARY_KEYS,
    own_scales,
    rotary_weights,
    without,
)

_KEYS = without(ROTARY_KEYS, "head_dim")
_SCALES = own_scales("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_ALL_HEADS = {"qk_norm": True, "qk_norm_scope": "all_heads"}
_AFTER = {**_ALL_HEADS, "pre_norms": False, "post_norms": True}

OLMO = Family(
    model_type="olmo",
    title="OLMo",
    architecture="OlmoForCausalLM",
    fields={"norm": "layer_unscaled", "norm_epsilon": 1e-5},
    keys=without(_KEYS, "norm_epsilon", attention_clip="clip_qkv"),
    absent={**ROTARY_ABSENT, "clip_qkv": None},
    rotary=RotaryMapping(),
    weights=rotary_weights({}),
)

OLMO2 = Family(
    model_type="olmo2",
    title="OLMo 2",
    architecture="Olmo2ForCausalLM",
    fields=_AFTER,
    keys=_KEYS,
    absent={**ROTARY_ABSENT, "rms_norm_eps": 1e-5},
    rotary=RotaryMapping(),
    weights=rotary_weights(POST_NORMS, MULTI_HEAD | GATED | _SCALES),
)

OLMO3 = Family(
    model_type="olmo3",
    title="OLMo 3",
    architecture="Olmo3ForCausalLM",
    fields=_AFTER,
    keys=_KEYS,
    absent={**ROTARY_ABSENT, "rms_norm_eps": 1e-5},
    rotary=RotaryMapping(theta=500_000.0, layers=ByLayerType(sliding_theta=500_000.0)),
    windows=every_nth_full(4, absent=4096),
    weights=rotary_weights(POST_NORMS, MULTI_HEAD | GATED | _SCALES),
)

_MIXTURE = MoEMapping(
    always={"ffn": 0},
    keys={"experts": "num_experts", "active": "num_experts_per_tok", "normalize_topk": "norm_topk_prob"},
    absent={"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    other_names={"num_experts": "num_local_experts"},
)

OLMOE = Family(
    model_type="olmoe",
    title="OLMoE",
    architecture="OlmoeForCausalLM",
    fields=_ALL_HEADS,
    keys=_KEYS,
    absent={**ROTARY_ABSENT, "rms_norm_eps": 1e-5},
    # Clipped after the norms of queries and keys, which ours are before.
    only={"clip_qkv": (None,)},
    rotary=RotaryMapping(),
    weights=rotary_weights(PRE_NORMS, MULTI_HEAD | EXPERTS | _SCALES),
    mixture=_MIXTURE,
)

FLEX_OLMO = Family(
    model_type="flex_olmo",
    title="FlexOlmo",
    architecture="FlexOlmoForCausalLM",
    fields=_AFTER,
    keys=_KEYS,
    absent=ROTARY_ABSENT,
    rotary=RotaryMapping(theta=500_000.0),
    weights=rotary_weights(POST_NORMS, MULTI_HEAD | EXPERTS | _SCALES),
    mixture=MoEMapping(
        always=_MIXTURE.always,
        keys=_MIXTURE.keys,
        absent={**_MIXTURE.absent, "num_experts": 7, "num_experts_per_tok": 5},
        other_names=_MIXTURE.other_names,
    ),
)

FAMILIES = (OLMO2, OLMO, OLMO3, OLMOE, FLEX_OLMO)
