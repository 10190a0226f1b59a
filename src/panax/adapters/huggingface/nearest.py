"""The known family that is nearest to an unknown config.json, by its keys and not by its name, and what it lacks."""

from collections.abc import Mapping
from typing import Any

from .family import Family
from .nested_config import LATENT_KEYS
from .rotary_positions import ROTARY_KEYS

NOT_ARCHITECTURE = {
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map", "use_cache", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop",
    "attn_pdrop", "output_router_logits", "router_aux_loss_coef", "pretraining_tp", "_name_or_path", "quantization_config",
    "id2label", "label2id", "num_labels", "return_dict", "output_attentions", "output_hidden_states", "problem_type", "dropout",
    "chunk_size_feed_forward", "hidden_dropout_prob", "attention_probs_dropout_prob", "embd_dropout", "classifier_dropout",
}  # fmt: skip
"""Keys that do not concern the computation of a layer."""

SHOWN = 8
"""Unknown keys that a message shows."""


def describe_nearest(raw: Mapping[str, Any], families: Mapping[str, Family]) -> str:
    """Describe the nearest family, the keys that it does not read, and a way to train the model today."""
    keys = raw.keys() - NOT_ARCHITECTURE
    named = raw.get("architectures") or []
    family = max(families.values(), key=lambda each: (each.architecture in named, _likeness(keys, known_keys(each))))
    unknown = sorted(key for key in keys - known_keys(family) if raw[key] not in (None, False, 0, [], {}))
    more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
    listed = ", ".join(f"{key}={_short(raw[key])}" for key in unknown[:SHOWN])
    lacks = (
        f"it does not read {listed}{more}" if unknown else "it reads all of its keys, and may compute something else"
    )
    return (
        f"By its keys it is nearest to {family.model_type}; {lacks}. A table for a family is in docs/extending/family.md; as a "
        f"PyTorch module the model trains today: panax.adapters.torch.task"
    )


def known_keys(family: Family) -> set[str]:
    """Return the keys of config.json that a family reads or checks."""
    keys = {*family.keys.values(), *family.only, *family.absent, *family.nested, *family.extra_keys}
    if family.rotary is not None:
        keys |= {*ROTARY_KEYS}
    if family.windows.listed:
        keys |= {"layer_types"}
    if family.latent:
        keys |= {*LATENT_KEYS.values()}
    return {key.partition(".")[0] for key in keys}


def _likeness(keys: set[str], family_keys: set[str]) -> float:
    """Return the share of keys in common."""
    return len(keys & family_keys) / max(len(keys | family_keys), 1)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
