"""A table's gradient, as the rows that a step touches, and what applies it: gathers and scatters, nothing of a table's size."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..core.layout import current_target
from .segments import segment_sums

Change = Callable[[jax.Array, Mapping[str, jax.Array], jax.Array], tuple[jax.Array, Mapping[str, jax.Array]]]
"""(rows, what is kept of them, their gradients) to both after an update."""


class RowGradients(eqx.Module):
    """The gradient of a table, or of a device's shard of one.

    Attributes:
        numbers: Row numbers in the shard, each once; its number of rows in places that hold none.
        values: The gradient of each; zeros where there is none.
        later: Where more rows come to a device than it takes in at a time, this device's own for the others, to be sent in
            further rounds: numbers in the whole table, ascending, and gradients. None on one device.
        later_square: The sum of squares of what comes in further rounds, over all devices.
    """

    numbers: Int[Array, " touched"]
    values: Float[Array, "touched row_width"]
    later: tuple[Int[Array, " asked"], Float[Array, "asked row_width"]] | None = None
    later_square: Float[Array, ""] | None = None

    def scaled(self, factor: Float[Array, ""]) -> "RowGradients":
        """All gradients multiplied by `factor`."""
        later = None if self.later is None else (self.later[0], self.later[1] * factor.astype(self.later[1].dtype))
        square = None if self.later_square is None else self.later_square * jnp.square(factor)
        return RowGradients(self.numbers, self.values * factor.astype(self.values.dtype), later, square)

    @property
    def square(self) -> Float[Array, ""]:
        """The sum of squares of all gradients."""
        here = jnp.square(self.values.astype(jnp.float32)).sum()
        return here if self.later_square is None else here + self.later_square


def merge_rows(
    numbers: Int[Array, " row"], values: Float[Array, "row row_width"], count: int
) -> tuple[Int[Array, " row"], Float[Array, "row row_width"]]:
    """Each row number once, ascending, with the sum of its values; `count` where none is left.

    Args:
        numbers: `count` where there is none.
    """
    order = jnp.argsort(numbers)
    ordered = numbers[order]
    new = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])
    place = jnp.cumsum(new, dtype=jnp.int32)
    once = jnp.full(numbers.shape, count, jnp.int32).at[place].set(ordered)
    # What is of no row stands last.
    place = jnp.where(ordered < count, place, numbers.shape[0])
    return once, segment_sums(values[order], place, numbers.shape[0], target=current_target(), ascending=True)


def update_rows(
    table: Float[Array, "row row_width"],
    kept: Mapping[str, Array],
    numbers: Int[Array, " touched"],
    gradients: Float[Array, "touched row_width"],
    change: Change,
    applied: Bool[Array, ""],
) -> tuple[jax.Array, dict[str, Any]]:
    """A table and what is kept of its rows after an update of those that `numbers` names; both as they were unless `applied`.

    The guard stands in the numbers: a selection between two tables would read and write all of both.

    Args:
        numbers: Each once; those past the table's end name none.
    """
    rows = table.at[numbers].get(mode="clip")
    before = {name: leaf.at[numbers].get(mode="clip") for name, leaf in kept.items()}
    after, kept_after = change(rows, before, gradients)
    place = jnp.where(applied, numbers, table.shape[0])

    def put(whole: jax.Array, part: jax.Array) -> jax.Array:
        return whole.at[place].set(part.astype(whole.dtype), mode="drop", unique_indices=True)

    return put(table, after), {name: put(leaf, kept_after[name]) for name, leaf in kept.items()}
