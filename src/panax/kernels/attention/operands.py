"""Values that attention kernels are called with: the rule of the scores, and the arrays of a pass."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array

from panax.kernels.attention.mask import MaskRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreRule:
    """Computation at each (query, key) pair: all static properties of attention except the blocks.

    Attributes:
        mask: The pairs that take part in the softmax.
        scale: Factor of the scores.
        soft_cap: Bounds scaled scores to (-soft_cap, soft_cap), before the mask.
    """

    mask: MaskRule
    scale: float
    soft_cap: float | None


class AttentionOperands(NamedTuple):
    """Queries, and the keys and values that they attend to: [batch, seq, heads, head_dim], or in a kernel's own layout.

    Attributes:
        query_segments: Document id of each query, [batch, query_seq]; 0 is padding. None: rows are one document.
        key_segments: The same of each key.
    """

    q: Array
    k: Array
    v: Array
    query_segments: Array | None = None
    key_segments: Array | None = None


class OutputGradient(NamedTuple):
    """A pass's output as its backward pass reads it.

    Attributes:
        logsumexp: Logarithm of each query's softmax sum, [batch, query_seq, heads].
        delta: From `output_delta`, in the same layout.
        d_out: Cotangent of the output, in the layout of the queries.
    """

    logsumexp: Array
    delta: Array
    d_out: Array
