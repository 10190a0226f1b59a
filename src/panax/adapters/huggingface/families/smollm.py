"""SmolLM 3: every fourth layer has no rotary positions.

Sources: the modeling and configuration files of `transformers` 5.23 (smollm3), and the released configuration.
"""

from collections.abc import Mapping
from typing import Any

from ..family import Family
from ..layer_rotary import Listed
from ..rotary_positions import RotaryMapping
from ..sliding_windows import WindowMapping
from ..tensor_names import PRE_NORMS, ROTARY_ABSENT, ROTARY_KEYS, rotary_weights, without


def _sliding(layer: int, raw: Mapping[str, Any]) -> bool:
    """Return True for layers without rotary positions."""
    listed = raw.get("no_rope_layers")
    if isinstance(listed, list):
        return layer < len(listed) and not listed[layer]
    every = raw.get("no_rope_layer_interval", 4)
    return type(every) is int and every > 0 and (layer + 1) % every == 0


SMOLLM3 = Family(
    model_type="smollm3",
    title="SmolLM3",
    architecture="SmolLM3ForCausalLM",
    keys=without(ROTARY_KEYS, "head_dim"),
    absent={**ROTARY_ABSENT, "num_key_value_heads": 4, "tie_word_embeddings": True},
    only={"mlp_bias": (False,)},
    rotary=RotaryMapping(theta=2_000_000.0, layers=Listed()),
    windows=WindowMapping(sliding=_sliding, switch="use_sliding_window"),
    weights=rotary_weights(PRE_NORMS),
)

FAMILIES = (SMOLLM3,)
