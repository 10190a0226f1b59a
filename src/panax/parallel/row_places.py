"""Where a table lies on a mesh, and tables whose rows no mesh axis splits."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core.errors import LayoutError
from ..core.expected import tag_comm
from ..core.layout import Layout, MeshAxes
from ..core.protocols import Axes
from ..mesh.rules import MESH_AXES
from ..spmd.collectives import all_gather, all_reduce, reduce_scatter, token_axes
from ..spmd.row_gradients import RowGradients, merge_rows
from ..spmd.rows import GatheredRows, distinct


class Lies(NamedTuple):
    """Where a table lies on a mesh, by axes above size 1.

    Attributes:
        rows: That its rows are split over.
        columns: That each row is split over.
        copies: Along which devices hold the same.
        alike: Along which devices work on the same examples, and ask for the same rows.
    """

    rows: MeshAxes
    columns: MeshAxes
    copies: MeshAxes
    alike: MeshAxes

    @classmethod
    def of(cls, name: str, axes: Axes, layout: Layout) -> "Lies":
        """
        Raises:
            LayoutError: Columns are split over what splits the examples.
        """
        rows, columns = layout.storage(axes)
        tokens = token_axes()
        clash = [axis for axis in columns if axis in tokens]
        if clash:
            raise LayoutError(
                f"{name}: its columns are split over {clash[0]}, which splits the examples too; split columns over tensor, or "
                f"rows over {clash[0]}"
            )
        above = tuple(axis for axis in MESH_AXES if layout.sizes[axis] > 1)
        copies = tuple(axis for axis in above if axis not in (*rows, *columns))
        return cls(rows, columns, copies, tuple(axis for axis in above if axis not in tokens))

    @property
    def shared_out(self) -> MeshAxes:
        """Along which devices ask for a part each of what all of them need."""
        return tuple(axis for axis in self.rows if axis in self.alike)

    @property
    def added(self) -> MeshAxes:
        """Along which copies are asked for the same rows, and have terms of the same gradients."""
        return tuple(axis for axis in self.copies if axis in self.alike)

    @property
    def met(self) -> MeshAxes:
        """Along which copies are asked for rows of their own, whose gradients meet once a step."""
        return tuple(axis for axis in self.copies if axis not in self.alike)


class Wanted(NamedTuple):
    """What a device reads of a table that it holds whole.

    Attributes:
        numbers: The distinct rows; the number of rows where there is none.
    """

    numbers: Int[Array, " touched"]


@dataclasses.dataclass(frozen=True)
class RowCopies:
    """A table whose rows every device holds, or the only one.

    Attributes:
        count: Its rows.
        distinct: The most that a device needs.
        whole: All rows stand in the table's place, and all have gradients: no more than what would be sorted and gathered.
    """

    lies: Lies
    count: int
    distinct: int
    whole: bool

    @classmethod
    def of(cls, lies: Lies, shard: tuple[int, ...], ids: int) -> "RowCopies":
        """
        Args:
            shard: A device's shape of the table.
            ids: How many numbers it asks for.
        """
        met = jax.lax.axis_size(lies.met) if lies.met else 1
        return cls(lies, shard[0], min(shard[0], ids), shard[0] <= ids * met)

    def open(self, table: Float[Array, "row row_width"], ids: Int[Array, " ids"]) -> tuple[GatheredRows, Wanted]:
        """The distinct rows of these numbers, -1 for none, and what `back` needs."""
        if self.whole:
            # All that write to a place write the same.
            place = jnp.where(ids < 0, self.count, ids)
            asked = jnp.zeros(self.count, jnp.int32).at[place].set(1, mode="drop")
            with tag_comm("numbers of rows"):
                asked = jax.lax.pmax(asked, self.lies.met) if self.lies.met else asked
            numbers = jnp.where(asked > 0, jnp.arange(self.count, dtype=jnp.int32), self.count)
            return GatheredRows(None, self._joined(table), self.count), Wanted(numbers)
        numbers = distinct(ids, self.count, self.distinct)
        return GatheredRows(numbers, self._joined(table.at[numbers].get(mode="clip")), self.count), Wanted(numbers)

    def back(self, gradients: Float[Array, "distinct row_width"], wanted: Wanted) -> RowGradients:
        """The gradients of the rows that this device holds, from those of the rows that it read."""
        with tag_comm("gradients of tables"):
            own = reduce_scatter(gradients, self.lies.columns, 1)
            if self.whole:
                return RowGradients(wanted.numbers, all_reduce(own, (*self.lies.added, *self.lies.met)))
            own = all_reduce(own, self.lies.added)
            if not self.lies.met:
                return RowGradients(wanted.numbers, own)
            numbers, values = all_gather(wanted.numbers, self.lies.met, 0), all_gather(own, self.lies.met, 0)
        return RowGradients(*merge_rows(numbers, values, self.count))

    def _joined(self, rows: jax.Array) -> jax.Array:
        with tag_comm("rows of tables"):
            return all_gather(rows, self.lies.columns, 1)
