"""Embedding bags: one vector per example, pooled from the table rows that it names."""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...core.errors import RecipeError
from ...spmd.rows import GatheredRows, is_rows, read_positions

Pooling = Literal["sum", "mean", "max"]


def embedding_rows(table: Any, ids: Int[Array, "*ids"]) -> Float[Array, "*ids row_width"]:
    """Look up a row of `table` for each id; zeros for -1.

    Args:
        table: A table parameter as passed to `loss`: its gathered rows (`spmd.GatheredRows`) during training,
            otherwise the array.

    >>> embedding_rows(jnp.array([[1.0], [2.0]]), jnp.array([1, -1])).tolist()
    [[2.0], [0.0]]
    """
    if is_rows(table):
        rows: GatheredRows = table
        return rows.read(ids)
    return read_positions(table, jnp.where(ids < 0, table.shape[0], ids))


def embedding_bag(
    table: Any,
    ids: Int[Array, "batch ids"],
    *,
    pooling: Pooling = "sum",
    weights: Float[Array, "batch ids"] | None = None,
) -> Float[Array, "batch row_width"]:
    """Compute the sum, mean or maximum of each bag's rows; zeros for an empty bag.

    Args:
        table: As in `embedding_rows`.
        ids: One bag per row, padded with -1.
        weights: Factor of each row, for sums and means only. A mean divides by the number of ids, as in
            PyTorch and FBGEMM.

    Raises:
        RecipeError: Weights are given with pooling "max".

    >>> bags = jnp.array([[0, 1], [1, -1], [-1, -1]])
    >>> embedding_bag(jnp.array([[1.0], [4.0]]), bags, pooling="mean").tolist()
    [[2.5], [4.0], [0.0]]
    """
    if pooling == "max" and weights is not None:
        raise RecipeError('pooling="max" takes no weights; remove them, or set pooling to "sum" or "mean"')
    return pool_rows(embedding_rows(table, ids), ids, pooling=pooling, weights=weights)


def pool_rows(
    rows: Float[Array, "batch ids row_width"],
    ids: Int[Array, "batch ids"],
    *,
    pooling: Pooling,
    weights: Float[Array, "batch ids"] | None = None,
) -> Float[Array, "batch row_width"]:
    """Pool rows that are already looked up, as `embedding_bag` does; rows with id -1 must be zeros."""
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
