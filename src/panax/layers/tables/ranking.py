"""Ranking metrics over a full catalog, computed chunk by chunk."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...core import Mean, current_layout
from ...core.measures import Metrics
from ...core.params.scopes import nan_for
from ...spmd import gather_weight
from ...spmd.collectives import all_reduce, axis_index


def target_ranks(
    queries: Float[Array, "batch embed"],
    targets: Int[Array, " batch"],
    table: Any,
    num_items: int,
    *,
    chunk: int = 8192,
) -> Float[Array, " batch"]:
    """Compute the rank of each target's score among all items, 1 for the highest; half of the tied items
    count as higher.

    Each device compares the items in its shard, and at most `chunk` scores per query are in memory at once. A
    query with a score that is not finite gets rank NaN, since comparisons with NaN are undefined.

    Args:
        table: A parameter with the axes `vocab embed`, one vector per item.
        num_items: Number of real items; later rows are padding.

    >>> catalog = jnp.array([[1.0], [3.0], [3.0], [2.0]])
    >>> target_ranks(jnp.ones((2, 1)), jnp.array([3, 1]), catalog, 4).tolist()
    [3.0, 1.5]
    """
    layout = current_layout()
    axes = () if layout is None else layout.compute(("vocab",))[0]
    queries, table = jax.lax.stop_gradient((queries, table))
    rows = gather_weight(table, "vocab embed", queries.dtype).value
    first = axis_index(axes) * rows.shape[0] if axes else 0
    chunk = min(chunk, rows.shape[0])
    starts = jnp.arange(0, rows.shape[0], chunk)

    def scored(start: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Score one chunk; return scores, item indices, and a mask: the last chunk starts early to keep its
        size."""
        begin = jnp.minimum(start, rows.shape[0] - chunk)
        part = jax.lax.dynamic_slice_in_dim(rows, begin, chunk)
        place = begin + jnp.arange(chunk)
        scores = jnp.einsum("be,ve->bv", queries, part, preferred_element_type=jnp.float32)
        return scores, first + place, (place >= start) & (first + place < num_items)

    # Two passes over the chunks: a target's score is known only after the first, and compared in the second.
    def own_score(total: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
        scores, items, counted = scored(start)
        mine = counted[None] & (items[None] == targets[:, None])
        return total + jnp.where(mine, scores, 0.0).sum(axis=1), None

    # Add 0 or NaN: comparisons below treat a NaN score as neither higher nor equal.
    zeros = jnp.zeros(queries.shape[0], jnp.float32) + 0.0 * queries[:, 0].astype(jnp.float32)
    target_scores, _ = jax.lax.scan(own_score, zeros, starts)
    target_scores = all_reduce(target_scores, axes) if axes else target_scores

    def compared(counts: tuple[jax.Array, jax.Array], start: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        scores, _, counted = scored(start)
        higher = (counted[None] & (scores > target_scores[:, None])).sum(axis=1)
        equal = (counted[None] & (scores == target_scores[:, None])).sum(axis=1)
        finite = (~counted[None] | jnp.isfinite(scores)).all(axis=1)
        higher = jnp.where(finite, higher.astype(jnp.float32), nan_for(lambda: ~finite))
        return (counts[0] + higher, counts[1] + equal.astype(jnp.float32)), None

    (higher, equal), _ = jax.lax.scan(compared, (zeros, zeros), starts)
    if axes:
        higher, equal = all_reduce((higher, equal), axes)
    # The target ties with itself.
    return higher + 0.5 * (equal + 1.0)


def ranking_metrics(ranks: Float[Array, " batch"], weights: Float[Array, " batch"], at: Sequence[int]) -> Metrics:
    """Compute hit rate and NDCG at each k, and the mean reciprocal rank, for queries with one correct item
    each.

    With one correct item, the hit rate equals the recall, and the ideal gain is 1.

    Args:
        weights: Weight of each query; 0 excludes it.

    >>> found = ranking_metrics(jnp.array([1.0, 3.0]), jnp.ones(2), (2,))
    >>> float(found["hit_rate@2"].value), float(found["ndcg@2"].value)
    (0.5, 0.5)
    """
    total = weights.sum()
    metrics: dict[str, Any] = {"mrr": Mean((weights / ranks).sum(), total)}
    for k in at:
        inside = weights * (ranks <= k).astype(jnp.float32)
        metrics[f"hit_rate@{k}"] = Mean(inside.sum(), total)
        metrics[f"ndcg@{k}"] = Mean((inside / jnp.log2(ranks + 1.0)).sum(), total)
    return metrics
