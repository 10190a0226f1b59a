"""In-batch softmax: each row's query against the items of all rows of the global batch, with its own item as
the target."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..spmd import all_gather_sum, token_axes
from ..spmd.collectives import all_gather, axis_index


class InBatchResult(NamedTuple):
    """Result of each of this device's rows.

    Attributes:
        loss: Negative log-probability of the row's own item.
        right: 1 if no other item has a higher score.
    """

    loss: Float[Array, " batch"]
    right: Float[Array, " batch"]


def in_batch_softmax(
    query: Float[Array, "batch hidden"],
    item: Float[Array, "batch hidden"],
    mask: Float[Array, " batch"],
    temperature: float,
    *,
    names: Int[Array, " batch"] | None = None,
    log_q: Float[Array, " batch"] | None = None,
) -> InBatchResult:
    """Compare each query with the items of all devices; the result is that of one device.

    Args:
        mask: 0 for rows of padding; their items are not used as negatives.
        names: Ids of the items; None if no two rows have the same item.
        log_q: As in `in_batch_scores`.
    """
    axes = token_axes()
    first = axis_index(axes) * len(item) if axes else 0
    items: Any = all_gather_sum(item, axes, 0) if axes else item
    names, log_q, real = (
        leaf if leaf is None or not axes else all_gather(leaf, axes, 0) for leaf in (names, log_q, mask)
    )
    assert real is not None
    targets = first + jnp.arange(query.shape[0])
    scores = in_batch_scores(query, items, targets, names, log_q, temperature)
    scores = jnp.where((real[None] > 0) | (jnp.arange(len(real))[None] == targets[:, None]), scores, -jnp.inf)
    right = jnp.take_along_axis(scores, targets[:, None], axis=1)[:, 0]
    best = (scores > right[:, None]).sum(axis=1) == 0
    return InBatchResult(jax.nn.logsumexp(scores, axis=1) - right, best.astype(jnp.float32))


def in_batch_scores(
    query: Float[Array, "batch hidden"],
    items: Float[Array, "items hidden"],
    own: Int[Array, " batch"],
    names: Int[Array, " items"] | None,
    log_q: Float[Array, " items"] | None,
    temperature: float,
) -> Float[Array, "batch items"]:
    """Score each query against all items of the global batch, with the query's own item at index `own`.

    Scores are corrected for sampling bias: the logarithm of an item's frequency is subtracted, so that they
    estimate a softmax over the whole catalog. Other rows that have the query's own item are masked.

    Args:
        names: The items' ids; None if all differ.
        log_q: Logarithm of each item's share of all examples; None for no correction.

    Source: Sampling-bias-corrected neural modeling (RecSys 2019, doi:10.1145/3298689.3346996), section 3.
    """
    scores = jnp.einsum("bd,id->bi", query, items, preferred_element_type=jnp.float32) / temperature
    if log_q is not None:
        scores = scores - log_q[None]
    if names is None:
        return scores
    same = names[own][:, None] == names[None]
    others = jnp.arange(items.shape[0])[None] != own[:, None]
    return jnp.where(same & others, -jnp.inf, scores)
