"""Phi 3 to 4: queries, keys and values in one tensor, as gate and up.

Sources: the modelling and configuration files of `transformers` 5.23 (phi3), and the released configurations.
"""

from ..family import Family
from ..rotary_positions import RotaryMapping
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

PHI3 = Family(
    model_type="phi3",
    title="Phi-3 and Phi-4",
    architecture="Phi3ForCausalLM",
    keys=without(ROTARY_KEYS, "attention_bias", "attention_output_bias", "head_dim"),
    absent={**ROTARY_ABSENT, "rms_norm_eps": 1e-5},
    only={"attention_bias": (False,)},
    rotary=RotaryMapping(fraction=1.0, scalings=("default",)),
    windows=ONE_WINDOW,
    weights=rotary_weights(PRE_NORMS, FUSED_HEADS | FUSED_GATE),
)

FAMILIES = (PHI3,)
