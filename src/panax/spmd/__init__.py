"""The language in which a model is written for one device of a mesh: opened weights, named contraction, sums and sequences."""

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
    from .bias import add_bias
    from .collectives import merge_over_devices, over_tokens, token_axes
    from .contraction import contract, contract_whole, gather
    from .gradients import accumulated, gradients_of
    from .linear import handed_on, joined, scattered, summed, totalled
    from .marks import Holds, cotangents_declared, declared, expected
    from .product import Product, multiplied
    from .rows import Rows
    from .sequence import (
        equal_shares,
        own_sequence,
        scatter_sequence,
        sequence_parallel_axes,
        sum_over_sequence,
        whole_sequence,
    )
    from .weights import Openable, Opened, OpenedAtRest, Opening, open_at_rest, open_weight

_WHERE = {
    "bias": ("add_bias",),
    "collectives": ("merge_over_devices", "over_tokens", "token_axes"),
    "contraction": ("contract", "contract_whole", "gather"),
    "gradients": ("accumulated", "gradients_of"),
    "linear": ("handed_on", "joined", "scattered", "summed", "totalled"),
    "marks": ("Holds", "cotangents_declared", "declared", "expected"),
    "product": ("Product", "multiplied"),
    "rows": ("Rows",),
    "sequence": (
        "equal_shares",
        "own_sequence",
        "scatter_sequence",
        "sequence_parallel_axes",
        "sum_over_sequence",
        "whole_sequence",
    ),
    "weights": ("Openable", "Opened", "OpenedAtRest", "Opening", "open_at_rest", "open_weight"),
}

__getattr__ = lazily(__name__, _WHERE)

__all__ = [
    "Holds", "Openable", "Opened", "OpenedAtRest", "Opening", "Product", "Rows", "accumulated", "add_bias", "contract",
    "contract_whole", "cotangents_declared", "declared", "equal_shares", "expected", "gather", "gradients_of", "handed_on",
    "joined", "merge_over_devices", "multiplied", "open_at_rest", "open_weight", "over_tokens", "own_sequence",
    "scatter_sequence", "scattered", "sequence_parallel_axes", "sum_over_sequence", "summed", "token_axes", "totalled",
    "whole_sequence",
]  # fmt: skip
