"""The number of each target within its answer, for losses that weight targets by it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...core import Batch
from ...core.batch_checks import MASK_LEAF
from ...core.layout.layout import axis_size
from ...parallel.context import sequence_positions
from ...spmd import ValueState, assert_sharding
from .segment_totals import sum_segments


def number_targets(batch: Batch) -> Float[Array, "batch seq"]:
    """Return the number, from 1, of each target with loss among those of its segment; 0 for others.

    A context axis splits the positions of a row, in any order: the masks of whole rows are gathered.
    """
    counted = (batch[MASK_LEAF] != 0).astype(jnp.float32)
    rows, local = counted.shape
    parts = axis_size("context")
    place = sequence_positions(local, context=parts)
    whole_rows = jnp.zeros((rows, local * parts)).at[:, place].set(counted)
    if parts > 1:
        whole_rows = jax.lax.psum(assert_sharding(whole_rows, {"context": ValueState.PARTIAL}), "context")
    # The sum before a place, so that the one before a segment is at its first position.
    before = jnp.cumsum(whole_rows, axis=1) - whole_rows
    first = jnp.maximum(place[None] - batch["position"], 0)
    number = before[:, place] + counted - jnp.take_along_axis(before, first, axis=1)
    number = jnp.where(counted > 0, number, 0.0)
    return assert_sharding(number, {"context": ValueState.SPLIT}, dim=1) if parts > 1 else number


def weight_longer_parts(number: Float[Array, "batch seq"], slot: jax.Array, alpha: float) -> Float[Array, "batch seq"]:
    """Return 1 for the targets that the shorter answer of the pair has too, by their number, and `alpha` for the rest.

    Source: LD-DPO (arXiv:2409.06411), equation 9.

    Args:
        number: Of `number_targets`.
        slot: Slots of the positions' segments; the two of a pair are adjacent.
    """
    counts = sum_segments((number > 0).astype(jnp.float32)[..., None], slot)[:, 0]
    shorter = jnp.repeat(counts.reshape(-1, 2).min(axis=1), 2)
    shared = shorter.at[jnp.where(slot < 0, shorter.shape[0], slot)].get(mode="fill", fill_value=0.0)
    return jax.lax.stop_gradient(jnp.where(number <= shared, 1.0, alpha))
