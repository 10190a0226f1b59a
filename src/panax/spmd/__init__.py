"""Building blocks of per-device (SPMD) model code: gathered weights, contractions by axis name, collectives
with derivatives, and sequence parallelism.
"""

from typing import TYPE_CHECKING

from ..core.lazy import lazy_getattr

if TYPE_CHECKING:
    from .bias import add_bias
    from .collectives import merge_over_devices, psum_over_tokens, token_axes
    from .contraction import contract, contract_gathered, gather
    from .gradients import accumulate_grads, compute_grads
    from .linear import all_gather_sum, psum_both, psum_forward, reduce_scatter_sum, shift_right
    from .product import WeightOp, apply_weight_op
    from .rows import GatheredRows
    from .sequence import (
        all_gather_sequence,
        local_sequence,
        reduce_scatter_sequence,
        sequence_parallel_axes,
        split_cotangent,
        sum_over_sequence,
    )
    from .sharding_marks import ValueState, assert_cotangent_sharding, assert_sharding, check_sharding
    from .weights import (
        GatheredWeight,
        GatheredWeightWithGrad,
        GatherSpec,
        WeightLike,
        gather_weight,
        gather_weight_early,
    )

_WHERE = {
    "bias": ("add_bias",),
    "collectives": ("merge_over_devices", "psum_over_tokens", "token_axes"),
    "contraction": ("contract", "contract_gathered", "gather"),
    "gradients": ("accumulate_grads", "compute_grads"),
    "linear": ("shift_right", "all_gather_sum", "reduce_scatter_sum", "psum_both", "psum_forward"),
    "sharding_marks": ("ValueState", "assert_cotangent_sharding", "assert_sharding", "check_sharding"),
    "product": ("WeightOp", "apply_weight_op"),
    "rows": ("GatheredRows",),
    "sequence": (
        "split_cotangent",
        "local_sequence",
        "reduce_scatter_sequence",
        "sequence_parallel_axes",
        "sum_over_sequence",
        "all_gather_sequence",
    ),
    "weights": (
        "WeightLike",
        "GatheredWeight",
        "GatheredWeightWithGrad",
        "GatherSpec",
        "gather_weight_early",
        "gather_weight",
    ),
}

__getattr__ = lazy_getattr(__name__, _WHERE)

__all__ = [
    "GatherSpec", "GatheredRows", "GatheredWeight", "GatheredWeightWithGrad", "ValueState", "WeightLike", "WeightOp",
    "accumulate_grads", "add_bias", "all_gather_sequence", "all_gather_sum", "apply_weight_op",
    "assert_cotangent_sharding", "assert_sharding", "check_sharding", "compute_grads", "contract", "contract_gathered",
    "gather", "gather_weight", "gather_weight_early", "local_sequence", "merge_over_devices", "psum_both",
    "psum_forward", "psum_over_tokens", "reduce_scatter_sequence", "reduce_scatter_sum", "sequence_parallel_axes",
    "shift_right", "split_cotangent", "sum_over_sequence", "token_axes",
]  # fmt: skip
