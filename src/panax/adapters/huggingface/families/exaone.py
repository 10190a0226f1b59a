"""EXAONE 4: norms after the sub-layers, rotary positions within windows only.

Sources: the modelling and configuration files of `transformers` 5.23 (exaone4), and the released configurations.
"""

from collections.abc import Mapping
from typing import Any

from ..family import Family
from ..layer_rotary import SlidingOnly
from ..rotary_mapping import RotaryMapping
from ..tensor_names import POST_NORMS, QK_NORMS, ROTARY_ABSENT, ROTARY_KEYS, rotary_weights, without
from ..window_mapping import WindowMapping


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
    keys=without(ROTARY_KEYS, "attention_bias", "attention_output_bias"),
    absent={**ROTARY_ABSENT, "rms_norm_eps": 1e-5},
    rotary=RotaryMapping(layers=SlidingOnly()),
    windows=WindowMapping(absent=4096, sliding=_sliding, keys=("sliding_window_pattern",)),
    weights=rotary_weights({**POST_NORMS, **QK_NORMS}),
)

FAMILIES = (EXAONE4,)
