"""Gathered rows of an embedding table, in place of the table while a loss is traced and differentiated.

    rows = GatheredRows(numbers, values, count)   # the distinct rows, gathered once per step
    vectors = rows.read(ids)                      # zeros for an id of -1

A table is never differentiated as a whole. Gradients exist only for `values`, the distinct rows of a step up
to a static bound: nothing of a table's size is allocated, and a row that a batch reads many times has one
gradient.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core.errors import RecipeError
from ..core.layout.layout import current_target
from .segments import segment_sums
from .weights import GatherSpec


class GatheredRows(eqx.Module):
    """Rows of a table, in place of the table in a module.

    Attributes:
        row_ids: Distinct row indices in ascending order, padded with `count`. None if all rows of the table
            are present.
        values: One row per index.
        count: Number of rows of the whole table.
    """

    row_ids: Int[Array, " unique_rows"] | None
    values: Float[Array, "distinct row_width"] | None
    count: int = eqx.field(static=True)

    @property
    def dtype(self) -> Any:
        return None if self.values is None else self.values.dtype

    def find_positions(self, ids: Int[Array, "*ids"]) -> Int[Array, "*ids"]:
        """Return the position of each row id in `values`.

        With n rows in `values`, it is n for an id of -1 and n + 1 for a row that was not gathered.
        """
        assert self.values is not None
        distinct = self.values.shape[0]
        if self.row_ids is None:
            return jnp.where(ids < 0, distinct, jnp.where(ids < distinct, ids, distinct + 1))
        flat = ids.reshape(-1)
        position = jnp.searchsorted(self.row_ids, flat).astype(jnp.int32)
        position = jnp.where(self.row_ids.at[position].get(mode="clip") == flat, position, distinct + 1)
        return jnp.where(flat < 0, distinct, position).reshape(ids.shape)

    def read(self, ids: Int[Array, "*ids"]) -> Float[Array, "*ids row_width"]:
        """Return a row for each id: zeros for -1, NaN for a row that the task's `row_ids` did not name."""
        assert self.values is not None
        places = self.find_positions(ids)
        rows = read_positions(self.values, places)
        lacking = places > self.values.shape[0]
        # Computed only for rows that need it: a NaN constant would stop a debugger that looks for NaN.
        unknown = jnp.sqrt(jnp.where(lacking, -1.0, 0.0)).astype(rows.dtype)
        return jnp.where(lacking[..., None], unknown[..., None], rows)

    def gather(self, to: GatherSpec) -> tuple[jax.Array, Any]:
        """Raise an error: gathered rows can't replace the full weight.

        Raises:
            RecipeError: Always: the rows are not the whole table.
        """
        raise RecipeError(
            f"a table of {self.count:,} rows ({' x '.join(map(str, to.axes))}) is read by embedding_bag or embedding_rows; what "
            f"multiplies all of it needs a parameter that is not a table"
        )

    def reduce_grad(self, to: GatherSpec, kept: Any, gradient: jax.Array) -> Any:
        return self.gather(to)


def is_rows(node: Any) -> bool:
    return isinstance(node, GatheredRows)


def max_distinct_rows(count: int, num_ids: int) -> int:
    """Return the maximum number of distinct rows among `num_ids` ids for a table of `count` rows."""
    return min(count, num_ids)


def unique_rows(ids: Int[Array, " asked"], count: int, bound: int) -> Int[Array, " unique_rows"]:
    """Return the distinct ids in ascending order, without -1, padded with `count`.

    >>> unique_rows(jnp.array([4, 1, -1, 4]), count=9, bound=3).tolist()
    [1, 4, 9]
    """
    ordered = jnp.sort(jnp.where(ids < 0, count, ids).astype(jnp.int32))
    new = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])
    # Duplicate indices all write the same value.
    return jnp.full(bound, count, jnp.int32).at[jnp.cumsum(new, dtype=jnp.int32)].set(ordered, mode="drop")


@jax.custom_vjp
def read_positions(
    values: Float[Array, "distinct row_width"], places: Int[Array, "*ids"]
) -> Float[Array, "*ids row_width"]:
    """Read rows at `places`, zeros past the end; gradients of a row are summed in a fixed order on every
    device.
    """
    return values.at[places].get(mode="fill", fill_value=0)


def _read_forward(values: jax.Array, places: jax.Array) -> tuple[jax.Array, Any]:
    return read_positions(values, places), (places, jnp.zeros((values.shape[0], 0), values.dtype))


def _read_backward(saved: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
    places, like = saved
    flat = gradient.reshape(-1, gradient.shape[-1]).astype(like.dtype)
    return segment_sums(flat, places.reshape(-1), like.shape[0], target=current_target()), None


read_positions.defvjp(_read_forward, _read_backward)
