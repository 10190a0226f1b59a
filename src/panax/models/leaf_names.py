"""Names that other libraries have for the leaves of the built-in models' batches."""

from collections.abc import Mapping

from ..core.leaf_ranges import MASK

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "tokens": ("input_ids", "inputs", "ids", "x"),
    "targets": ("labels", "target", "y"),
    MASK: ("mask", "attention_mask", "label_mask", "weights", "sample_weight"),
    "image": ("pixel_values", "images", "pixels", "x"),
    "label": ("labels", "target", "targets", "y"),
    "items": ("item", "input_ids", "item_ids"),
    "segment": ("segment_ids", "segments"),
    "position": ("position_ids", "positions"),
}
"""By the leaf: a batch that has one of the names instead gets an error that suggests the leaf."""
