"""Names that other libraries use for the batch leaves of the built-in models."""

from collections.abc import Mapping

from ..core.batch_checks import MASK_LEAF

LEAF_ALIASES: Mapping[str, tuple[str, ...]] = {
    "tokens": ("input_ids", "inputs", "ids", "x"),
    "targets": ("labels", "target", "y"),
    MASK_LEAF: ("mask", "attention_mask", "label_mask", "weights", "sample_weight"),
    "image": ("pixel_values", "images", "pixels", "x"),
    "label": ("labels", "target", "targets", "y"),
    "items": ("item", "input_ids", "item_ids"),
    "segment": ("segment_ids", "segments"),
    "position": ("position_ids", "positions"),
}
"""Other names of each leaf; the error for a batch that has one of them suggests the leaf."""
