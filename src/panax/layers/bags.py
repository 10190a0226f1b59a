"""Bags of rows: a vector for each example from the rows that it names in a table."""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core.errors import RecipeError
from ..spmd.rows import GatheredRows, is_rows, read_places

Pooling = Literal["sum", "mean", "max"]


def embedding_rows(table: Any, ids: Int[Array, "*ids"]) -> Float[Array, "*ids row_width"]:
    """A row of `table` for each id, zeros for -1.

    Args:
        table: A table parameter as passed to `loss`: its rows (`spmd.GatheredRows`) during training, or the array.

    >>> embedding_rows(jnp.array([[1.0], [2.0]]), jnp.array([1, -1])).tolist()
    [[2.0], [0.0]]
    """
    if is_rows(table):
        rows: GatheredRows = table
        return rows.read(ids)
    return read_places(table, jnp.where(ids < 0, table.shape[0], ids))


def embedding_bag(
    table: Any,
    ids: Int[Array, "batch ids"],
    *,
    pooling: Pooling = "sum",
    weights: Float[Array, "batch ids"] | None = None,
) -> Float[Array, "batch row_width"]:
    """The sum, mean or maximum of each bag's rows; zeros for an empty bag.

    Args:
        table: As `embedding_rows` takes it.
        ids: Each row a bag, -1 where it has no more.
        weights: What each row is multiplied with before they are added up; of sums and means. A mean divides by the number of
            ids, as PyTorch's and FBGEMM's do.

    Raises:
        RecipeError: A maximum is asked for with weights.

    >>> bags = jnp.array([[0, 1], [1, -1], [-1, -1]])
    >>> embedding_bag(jnp.array([[1.0], [4.0]]), bags, pooling="mean").tolist()
    [[2.5], [4.0], [0.0]]
    """
    if pooling == "max" and weights is not None:
        raise RecipeError('pooling="max" takes no weights; leave them out, or set pooling to "sum" or "mean"')
    return pool_rows(embedding_rows(table, ids), ids, pooling=pooling, weights=weights)


def pool_rows(
    rows: Float[Array, "batch ids row_width"],
    ids: Int[Array, "batch ids"],
    *,
    pooling: Pooling,
    weights: Float[Array, "batch ids"] | None = None,
) -> Float[Array, "batch row_width"]:
    """What `embedding_bag` makes of rows that were read before, zeros where an id is -1."""
    there = ids >= 0
    if pooling == "max":
        highest = jnp.where(there[..., None], rows, -jnp.inf).max(axis=1)
        return jnp.where(there.any(axis=1)[:, None], highest, 0.0)
    if weights is not None:
        rows = rows * jnp.where(there, weights, 0.0).astype(rows.dtype)[..., None]
    total = rows.sum(axis=1)
    if pooling == "mean":
        total = total / jnp.maximum(there.sum(axis=1), 1).astype(total.dtype)[:, None]
    return total
