"""Rows of a table in the table's place, while a loss is traced and differentiated.

    rows = Rows.of(table, ids)                    # the distinct ones, gathered once a step
    vectors = rows.read(ids)                      # zeros where an id is -1

A table is never differentiated whole. Gradients exist for `values`, the distinct rows of a step under a static bound, so that
nothing of a table's size is made, and a row that a batch asks for many times has one gradient.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core.errors import RecipeError
from ..core.layout import current_target
from .segments import segment_sums
from .weights import GatherSpec


class GatheredRows(eqx.Module):
    """Stands in a module where a table stood.

    Attributes:
        numbers: The distinct row numbers, ascending; past the last of them `count`. None where all rows of the table are here.
        values: A row for each.
        count: Rows of the whole table.
    """

    numbers: Int[Array, " distinct"] | None
    values: Float[Array, "distinct row_width"] | None
    count: int = eqx.field(static=True)

    @property
    def dtype(self) -> Any:
        return None if self.values is None else self.values.dtype

    def places(self, ids: Int[Array, "*ids"]) -> Int[Array, "*ids"]:
        """Where each row number stands in `values`: one past the last for -1, two for a row that was not gathered."""
        assert self.values is not None
        distinct = self.values.shape[0]
        if self.numbers is None:
            return jnp.where(ids < 0, distinct, jnp.where(ids < distinct, ids, distinct + 1))
        flat = ids.reshape(-1)
        found = jnp.searchsorted(self.numbers, flat).astype(jnp.int32)
        found = jnp.where(self.numbers.at[found].get(mode="clip") == flat, found, distinct + 1)
        return jnp.where(flat < 0, distinct, found).reshape(ids.shape)

    def read(self, ids: Int[Array, "*ids"]) -> Float[Array, "*ids row_width"]:
        """A row for each row number, zeros for -1; NaN for a row that the task's `row_ids` did not name."""
        assert self.values is not None
        places = self.places(ids)
        rows = read_places(self.values, places)
        lacking = places > self.values.shape[0]
        # Made where it is needed alone: a debugger that looks for NaN stops at a constant one.
        unknown = jnp.sqrt(jnp.where(lacking, -1.0, 0.0)).astype(rows.dtype)
        return jnp.where(lacking[..., None], unknown[..., None], rows)

    def open(self, to: GatherSpec) -> tuple[jax.Array, Any]:
        """
        Raises:
            RecipeError: Always: rows are not the whole table.
        """
        raise RecipeError(
            f"a table of {self.count:,} rows ({' x '.join(map(str, to.axes))}) is read by embedding_bag or embedding_rows; what "
            f"multiplies all of it needs a parameter that is not a table"
        )

    def returned(self, to: GatherSpec, kept: Any, gradient: jax.Array) -> Any:
        return self.open(to)


def is_rows(node: Any) -> bool:
    return isinstance(node, GatheredRows)


def distinct_bound(count: int, asked: int) -> int:
    """The most distinct rows among `asked` row numbers of a table of `count`."""
    return min(count, asked)


def distinct(ids: Int[Array, " asked"], count: int, bound: int) -> Int[Array, " distinct"]:
    """The distinct row numbers among `ids`, ascending, without -1; past the last of them `count`.

    >>> distinct(jnp.array([4, 1, -1, 4]), count=9, bound=3).tolist()
    [1, 4, 9]
    """
    ordered = jnp.sort(jnp.where(ids < 0, count, ids).astype(jnp.int32))
    new = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])
    # All that write to a place write the same number.
    return jnp.full(bound, count, jnp.int32).at[jnp.cumsum(new, dtype=jnp.int32)].set(ordered, mode="drop")


@jax.custom_vjp
def read_places(
    values: Float[Array, "distinct row_width"], places: Int[Array, "*ids"]
) -> Float[Array, "*ids row_width"]:
    """Rows at `places`, zeros past the end; a row's gradient is summed in one order, whatever the device."""
    return values.at[places].get(mode="fill", fill_value=0)


def _read_forward(values: jax.Array, places: jax.Array) -> tuple[jax.Array, Any]:
    return read_places(values, places), (places, jnp.zeros((values.shape[0], 0), values.dtype))


def _read_backward(saved: Any, gradient: jax.Array) -> tuple[jax.Array, None]:
    places, like = saved
    flat = gradient.reshape(-1, gradient.shape[-1]).astype(like.dtype)
    return segment_sums(flat, places.reshape(-1), like.shape[0], target=current_target()), None


read_places.defvjp(_read_forward, _read_backward)
