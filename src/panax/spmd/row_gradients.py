"""Sparse gradients of embedding tables and their application: gathers and scatters of the rows that a step
touches, with nothing of a table's size.
"""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..core.layout.layout import current_target
from .segments import segment_sums

Change = Callable[[jax.Array, Mapping[str, jax.Array], jax.Array], tuple[jax.Array, Mapping[str, jax.Array]]]
"""(rows, optimizer state of these rows, gradients of these rows) to (updated rows, updated state)."""


class RowGradients(eqx.Module):
    """The sparse gradient of a table, or of a device's shard of one.

    Attributes:
        row_ids: Distinct row indices within the shard, padded with the shard's number of rows.
        values: The gradient of each row; zeros in padding.
        later: If more rows arrive at a device than it accepts at a time, this device's gradients for the
            other devices, to be sent in further rounds: ascending row indices in the whole table, and
            gradients. None on one device.
        later_square: Sum of squares of the gradients of further rounds, over all devices.
    """

    row_ids: Int[Array, " touched"]
    values: Float[Array, "touched row_width"]
    later: tuple[Int[Array, " asked"], Float[Array, "asked row_width"]] | None = None
    later_square: Float[Array, ""] | None = None

    def scale(self, factor: Float[Array, ""]) -> "RowGradients":
        """Multiply all gradients by `factor`."""
        later = None if self.later is None else (self.later[0], self.later[1] * factor.astype(self.later[1].dtype))
        square = None if self.later_square is None else self.later_square * jnp.square(factor)
        return RowGradients(self.row_ids, self.values * factor.astype(self.values.dtype), later, square)

    @property
    def square(self) -> Float[Array, ""]:
        """Sum of squares of all gradients, in float32."""
        first_round = jnp.square(self.values.astype(jnp.float32)).sum()
        return first_round if self.later_square is None else first_round + self.later_square


def merge_rows(
    numbers: Int[Array, " row"], values: Float[Array, "row row_width"], count: int
) -> tuple[Int[Array, " row"], Float[Array, "row row_width"]]:
    """Merge duplicate row indices and sum their values; return distinct ascending indices, padded with
    `count`.

    Args:
        numbers: Row indices; `count` marks padding.
    """
    order = jnp.argsort(numbers)
    ordered = numbers[order]
    new = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])
    place = jnp.cumsum(new, dtype=jnp.int32)
    distinct = jnp.full(numbers.shape, count, jnp.int32).at[place].set(ordered)
    # Padding goes last.
    place = jnp.where(ordered < count, place, numbers.shape[0])
    return distinct, segment_sums(values[order], place, numbers.shape[0], target=current_target(), ascending=True)


def update_rows(
    table: Float[Array, "row row_width"],
    state: Mapping[str, Array],
    numbers: Int[Array, " touched"],
    gradients: Float[Array, "touched row_width"],
    change: Change,
    applied: Bool[Array, ""],
) -> tuple[jax.Array, dict[str, Any]]:
    """Update the rows of a table, and their optimizer state, at the indices `numbers`.

    If `applied` is false, both are returned unchanged. This is done by making every index out of range: a
    select between two tables would read and write all of both.

    Args:
        state: Optimizer state, one row per row of the table.
        numbers: Distinct row indices; those past the table's end are ignored.
    """
    rows = table.at[numbers].get(mode="clip")
    before = {name: leaf.at[numbers].get(mode="clip") for name, leaf in state.items()}
    after, kept_after = change(rows, before, gradients)
    place = jnp.where(applied, numbers, table.shape[0])

    def put(target: jax.Array, part: jax.Array) -> jax.Array:
        return target.at[place].set(part.astype(target.dtype), mode="drop", unique_indices=True)

    return put(table, after), {name: put(leaf, kept_after[name]) for name, leaf in state.items()}
