"""Phi 3 to 4: queries, keys and values in one tensor, as gate and up.

Sources: the modeling and configuration files of `transformers` 5.23 (phi3), and the released configurations.
"""

from collections.abc import Mapping
from typing import Any

from ..family import Family, RefuseFn
from ..rotary_positions import LONG, PLACES, RotaryMapping
from ..sliding_windows import ONE_WINDOW
from ..tensor_names import (
    FUSED_GATE,
    FUSED_HEADS,
    PRE_NORMS,
    ROTARY_ABSENT,
    ROTARY_KEYS,
    rotary_weights,
    without,
)

_OLD_NAMES = ("su", "yarn")
"""Names of longrope in the first releases."""


def _renamed(raw: Mapping[str, Any], refuse: RefuseFn) -> Mapping[str, Any]:
    """Read the first releases' names of longrope, as `transformers` does."""
    for key in PLACES:
        inner = raw.get(key)
        if isinstance(inner, Mapping) and inner.get("rope_type", inner.get("type")) in _OLD_NAMES:
            return {**raw, key: {**inner, "rope_type": LONG}}
    return raw


PHI3 = Family(
    model_type="phi3",
    title="Phi-3 and Phi-4",
    architecture="Phi3ForCausalLM",
    keys=without(ROTARY_KEYS, "attention_bias", "attention_output_bias", "head_dim"),
    absent={**ROTARY_ABSENT, "rms_norm_eps": 1e-5},
    only={"attention_bias": (False,)},
    rotary=RotaryMapping(fraction=1.0, scalings=("default", LONG)),
    complete=_renamed,
    windows=ONE_WINDOW,
    weights=rotary_weights(PRE_NORMS, FUSED_HEADS | FUSED_GATE),
)

FAMILIES = (PHI3,)
