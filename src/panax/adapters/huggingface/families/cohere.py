"""Command R, R+, R7B and A: attention and feed-forward side by side, with one norm.

Sources: the modeling and configuration files of `transformers` 5.23 (cohere, cohere2), and the released configurations.
"""

from collections.abc import Mapping
from typing import Any

from ....models import DecoderConfig
from ..family import Family, RefuseFn
from ..layer_rotary import SlidingOnly
from ..rotary_positions import RotaryMapping
from ..sliding_windows import every_nth_full
from ..tensor_names import GATED, MULTI_HEAD, ROTARY_ABSENT, ROTARY_KEYS, rotary_weights, without

_FIELDS = {"norm": "layer_unbiased", "parallel_residual": True, "shared_norm": True}
_KEYS = without(ROTARY_KEYS, "head_dim", norm_epsilon="layer_norm_eps", logit_multiplier="logit_scale")
_ABSENT = {**ROTARY_ABSENT, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}
_NORM = {"attention_norm.scale": "input_layernorm.weight"}

_SCALES = {
    "attention.q_scale": ("self_attn.q_norm.weight", "heads head_dim"),
    "attention.k_scale": ("self_attn.k_norm.weight", "kv_heads head_dim"),
}


def _read_norms(raw: Mapping[str, Any], refuse: RefuseFn) -> dict[str, Any]:
    normed = raw.get("use_qk_norm", False)
    if not isinstance(normed, bool):
        refuse("use_qk_norm", "expected a value of type bool")
    return {"qk_norm": normed, "qk_norm_scope": "own_head" if normed else "head"}


def _write_norms(config: DecoderConfig) -> tuple[dict[str, Any], list[str]]:
    wrong = config.qk_norm and config.qk_norm_scope != "own_head"
    problems = [f"model.qk_norm_scope={config.qk_norm_scope!r}, expected 'own_head'"] if wrong else []
    return {"use_qk_norm": config.qk_norm}, problems


COHERE = Family(
    model_type="cohere",
    title="Command R",
    architecture="CohereForCausalLM",
    fields=_FIELDS,
    keys=_KEYS,
    absent=_ABSENT,
    rotary=RotaryMapping(theta=500_000.0, interleaved=True),
    weights=rotary_weights(_NORM, MULTI_HEAD | GATED | _SCALES),
    computed=("qk_norm", "qk_norm_scope"),
    read=_read_norms,
    write=_write_norms,
)

COHERE2 = Family(
    model_type="cohere2",
    title="Command R7B and Command A",
    architecture="Cohere2ForCausalLM",
    fields=_FIELDS,
    keys=_KEYS,
    absent=_ABSENT,
    rotary=RotaryMapping(interleaved=True, layers=SlidingOnly(always=True)),
    windows=every_nth_full(4, "sliding_window_pattern", absent=4096),
    weights=rotary_weights(_NORM, MULTI_HEAD | GATED),
)

FAMILIES = (COHERE, COHERE2)
