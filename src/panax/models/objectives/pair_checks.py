"""Checks of preference pairs in rows, and their number."""

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import Batch
from ...core.measures import NO_FAULT, DataChecks
from .segment_totals import find_starts, is_in_segment


def mark_chosen(batch: Batch) -> Float[Array, "... batch seq"]:
    """Return 1 for the positions of chosen answers and their prompts, else 0."""
    return (is_in_segment(batch) & (batch["segment"] % 2 == 1)).astype(jnp.float32)


def count_chosen_starts(batch: Batch) -> Float[Array, ""]:
    """Count the pairs with a chosen answer that begins on this device."""
    return (find_starts(batch) * mark_chosen(batch)).sum()


def check_pairs(sums: Float[Array, "pair 2 value"], stray: Float[Array, "batch seq"]) -> Mapping[str, DataChecks]:
    """Check that each segment has targets, and a partner with targets.

    Args:
        sums: Of each segment's targets with loss, and of its beginnings.
        stray: 1 for positions of segments that a row has no room for.
    """
    number = jnp.arange(sums.shape[0], dtype=jnp.float32)
    incomplete = (sums > 0).any(axis=(1, 2)) & ~(sums > 0).all(axis=(1, 2))
    worst = [jnp.where(incomplete, number, NO_FAULT).max(), jnp.where(stray > 0, 1.0, NO_FAULT).max()]
    checks = (
        "a preference pair lacks an answer, or one has no target with loss_mask above 0, or does not begin at position 0; "
        "expected the segments 2k-1 and 2k of one row, each with targets. The pair's number in its part of the batch: ",
        "a row has more segments than its positions allow, two for each pair: ",
    )
    return {"pair_faults": DataChecks(jnp.stack(worst), checks)}
