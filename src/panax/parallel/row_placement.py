"""Sharding of embedding tables on a mesh, and access to tables with rows that no mesh axis shards."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..core.errors import LayoutError
from ..core.layout.declarations import tag_comm
from ..core.layout.layout import Layout, MeshAxes
from ..core.protocols import Axes
from ..mesh.rules import MESH_AXES
from ..spmd.collectives import all_gather, all_reduce, reduce_scatter, token_axes
from ..spmd.row_gradients import RowGradients, merge_rows
from ..spmd.rows import GatheredRows, unique_rows


class TablePlacement(NamedTuple):
    """Sharding of a table, by mesh axes larger than 1.

    Attributes:
        rows: Axes that shard its rows.
        columns: Axes that shard each row.
        copies: Axes along which devices hold replicas.
        alike: Axes along which devices process the same examples, and so need the same rows.
    """

    rows: MeshAxes
    columns: MeshAxes
    copies: MeshAxes
    alike: MeshAxes

    @classmethod
    def of(cls, name: str, axes: Axes, layout: Layout) -> "TablePlacement":
        """Derive the sharding of a table from its logical axes.

        Raises:
            LayoutError: Columns are sharded over an axis that shards the examples.
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
    def request_axes(self) -> MeshAxes:
        """Axes along which devices each request a part of the rows that all of them need."""
        return tuple(axis for axis in self.rows if axis in self.alike)

    @property
    def sum_axes(self) -> MeshAxes:
        """Axes along which replicas receive requests for the same rows, and hold partial sums of the same gradients."""
        return tuple(axis for axis in self.copies if axis in self.alike)

    @property
    def reduce_axes(self) -> MeshAxes:
        """Axes along which replicas receive requests for different rows, with gradients that are combined once
        per step."""
        return tuple(axis for axis in self.copies if axis not in self.alike)


class LocalRowRequest(NamedTuple):
    """Rows that a device reads of a replicated table.

    Attributes:
        row_ids: Indices of the distinct rows, padded with the table's number of rows.
    """

    row_ids: Int[Array, " touched"]


@dataclasses.dataclass(frozen=True)
class RowCopies:
    """A table that every device holds with all rows.

    Attributes:
        count: Number of rows.
        distinct: Maximum number of distinct rows that a device needs.
        whole: True to pass the whole table with gradients for all rows, if that is no more than what would be
            sorted and gathered.
    """

    placement: TablePlacement
    count: int
    distinct: int
    whole: bool

    @classmethod
    def of(cls, placement: TablePlacement, shard: tuple[int, ...], ids: int) -> "RowCopies":
        """Choose how to access the table.

        Args:
            shard: Shape of a device's shard of the table.
            ids: Number of ids that a device reads.
        """
        met = jax.lax.axis_size(placement.reduce_axes) if placement.reduce_axes else 1
        return cls(placement, shard[0], min(shard[0], ids), shard[0] <= ids * met)

    def gather(
        self, table: Float[Array, "row row_width"], ids: Int[Array, " ids"]
    ) -> tuple[GatheredRows, LocalRowRequest]:
        """Read the distinct rows of the given ids (-1 for none); also return the request, which
        `return_gradients` needs."""
        if self.whole:
            # Duplicate indices all write the same value.
            place = jnp.where(ids < 0, self.count, ids)
            request = jnp.zeros(self.count, jnp.int32).at[place].set(1, mode="drop")
            with tag_comm("numbers of rows"):
                request = jax.lax.pmax(request, self.placement.reduce_axes) if self.placement.reduce_axes else request
            numbers = jnp.where(request > 0, jnp.arange(self.count, dtype=jnp.int32), self.count)
            return GatheredRows(None, self._joined(table), self.count), LocalRowRequest(numbers)
        numbers = unique_rows(ids, self.count, self.distinct)
        return GatheredRows(numbers, self._joined(table.at[numbers].get(mode="clip")), self.count), LocalRowRequest(
            numbers
        )

    def return_gradients(self, gradients: Float[Array, "distinct row_width"], request: LocalRowRequest) -> RowGradients:
        """Compute the gradients of the rows that this device holds, from those of the rows that it read."""
        with tag_comm("gradients of tables"):
            shard = reduce_scatter(gradients, self.placement.columns, 1)
            if self.whole:
                return RowGradients(
                    request.row_ids, all_reduce(shard, (*self.placement.sum_axes, *self.placement.reduce_axes))
                )
            shard = all_reduce(shard, self.placement.sum_axes)
            if not self.placement.reduce_axes:
                return RowGradients(request.row_ids, shard)
            numbers, values = (
                all_gather(request.row_ids, self.placement.reduce_axes, 0),
                all_gather(shard, self.placement.reduce_axes, 0),
            )
        return RowGradients(*merge_rows(numbers, values, self.count))

    def _joined(self, rows: jax.Array) -> jax.Array:
        with tag_comm("rows of tables"):
            return all_gather(rows, self.placement.columns, 1)
