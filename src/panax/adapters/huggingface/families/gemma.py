"""Gemma 1 to 3, and VaultGemma.

Sources: the modeling and configuration files of `transformers` 5.23 (gemma, gemma2, gemma3, vaultgemma), and the released
configurations.
"""

from collections.abc import Mapping
from typing import Any

from ....models import DecoderConfig
from ..family import Family, RefuseFn
from ..layer_rotary import ByLayerType
from ..rotary_positions import RotaryMapping
from ..sliding_windows import every_nth_full
from ..tensor_names import PRE_NORMS, QK_NORMS, ROTARY_ABSENT, ROTARY_KEYS, rotary_weights, without

_SCALED = {"norm_unit_offset": True, "embed_scale": True}

_CAPPED = {
    **ROTARY_KEYS,
    "activation": "hidden_activation",
    "attention_soft_cap": "attn_logit_softcapping",
    "logit_soft_cap": "final_logit_softcapping",
    "query_scale": "query_pre_attn_scalar",
}

_ABSENT = {
    **ROTARY_ABSENT,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "query_pre_attn_scalar": 256,
}

_AROUND = {
    "attention_norm.scale": "input_layernorm.weight",
    "attention_post_norm.scale": "post_attention_layernorm.weight",
    "feed_forward_norm.scale": "pre_feedforward_layernorm.weight",
    "feed_forward_post_norm.scale": "post_feedforward_layernorm.weight",
}

_CAUSAL: dict[str, tuple[Any, ...]] = {"use_bidirectional_attention": (None, False)}


def _tanh_is_meant(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    """Read "gelu", the value in the first releases, as `transformers` does."""
    return {**raw, "hidden_act": "gelu_pytorch_tanh"} if raw.get("hidden_act") == "gelu" else raw


def _write_gemma(config: DecoderConfig) -> tuple[dict[str, Any], list[str]]:
    return {}, ["model.activation='gelu', expected another: it would be read as gelu_tanh"] * (
        config.activation == "gelu"
    )


GEMMA = Family(
    model_type="gemma",
    title="Gemma",
    architecture="GemmaForCausalLM",
    fields=_SCALED,
    keys=ROTARY_KEYS,
    absent={**ROTARY_ABSENT, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    only=_CAUSAL,
    rotary=RotaryMapping(),
    weights=rotary_weights(PRE_NORMS),
    complete=_tanh_is_meant,
    write=_write_gemma,
)

GEMMA2 = Family(
    model_type="gemma2",
    title="Gemma 2",
    architecture="Gemma2ForCausalLM",
    fields={**_SCALED, "post_norms": True},
    keys=_CAPPED,
    absent=_ABSENT,
    only=_CAUSAL,
    rotary=RotaryMapping(),
    windows=every_nth_full(2, absent=4096, needs=4096),
    weights=rotary_weights(_AROUND),
    whole_heads=True,
)

GEMMA3 = Family(
    model_type="gemma3_text",
    title="Gemma 3",
    architecture="Gemma3ForCausalLM",
    fields={**_SCALED, "post_norms": True, "qk_norm": True},
    keys=without(_CAPPED, "attention_soft_cap"),
    absent={**without(_ABSENT, "attn_logit_softcapping"), "final_logit_softcapping": None},
    # A cap on the scores is in the settings, and `transformers` does not compute it.
    only={**_CAUSAL, "attn_logit_softcapping": (None,)},
    rotary=RotaryMapping(theta=1_000_000.0, layers=ByLayerType("rope_local_base_freq", 10_000.0)),
    windows=every_nth_full(6, "sliding_window_pattern", absent=4096, needs=4096),
    weights=rotary_weights({**_AROUND, **QK_NORMS}),
    whole_heads=True,
)

VAULTGEMMA = Family(
    model_type="vaultgemma",
    title="VaultGemma",
    architecture="VaultGemmaForCausalLM",
    fields=_SCALED,
    keys=_CAPPED,
    absent=_ABSENT,
    rotary=RotaryMapping(),
    windows=every_nth_full(2, absent=4096, needs=4096),
    weights=rotary_weights(
        {
            "attention_norm.scale": "input_layernorm.weight",
            "feed_forward_norm.scale": "pre_feedforward_layernorm.weight",
        }
    ),
    whole_heads=True,
)

FAMILIES = (GEMMA2, GEMMA, GEMMA3, VAULTGEMMA)
