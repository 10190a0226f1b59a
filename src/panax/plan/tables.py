"""Cost of embedding tables on each device and in each step, by formula: bytes, distinct rows, and
communication."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import named_leaves
from ..mesh.rules import MeshAxes
from ..parallel.row_exchange import SPARE
from ..parallel.row_placement import TablePlacement
from ..spmd.collectives import token_axes
from ..system.terminal_text import format_bytes
from ..train import CompiledStep
from .collectives import CollectiveKind, ring_wire_bytes

FLOAT32 = INT32 = 4
KEY_BYTES = 8


@dataclasses.dataclass(frozen=True)
class TableCost:
    """Cost of a table in one step, on each device.

    Attributes:
        rows: Rows of the whole table, with `width` values each.
        placement: Its sharding.
        sizes: Mesh axis to size.
        ids: Number of row indices in a device's examples.
        counted_rows: Number of distinct rows in a real batch, on the device with the most; None if only shapes
            are known.
        means: True if its optimizer uses means of whole rows.
        table_bytes: Bytes of the table and its optimizer state, on a device.
        key_axes: If rows are assigned to keys, the mesh axes along which keys are all-gathered; None if ids are
            fixed.
    """

    name: str
    rows: int
    width: int
    placement: TablePlacement
    sizes: Mapping[str, int]
    ids: int
    counted_rows: int | None
    means: bool
    table_bytes: int
    key_axes: MeshAxes | None = None

    @property
    def distinct_rows(self) -> int:
        """Return the largest possible number of distinct rows."""
        return min(self.ids, self.rows)

    @property
    def requested_rows(self) -> int:
        """Return the maximum number of rows that a device requests: devices that need the same rows request a
        part each."""
        return -(-self.distinct_rows // self._size(self.placement.request_axes))

    @property
    def is_dense(self) -> bool:
        """Return True if gradients have all rows of the table, because these are no more than would be gathered."""
        return not self.placement.rows and self.rows <= self.ids * self._size(self.placement.reduce_axes)

    def sent_bytes(self) -> dict[tuple[CollectiveKind, MeshAxes], int]:
        """Return the bytes that a device sends in a step in which one round delivers everything, by kind and
        mesh axes."""
        ledger: dict[tuple[CollectiveKind, MeshAxes], int] = {}

        def add(kind: CollectiveKind, axes: MeshAxes, size: int) -> None:
            ways = self._size(axes)
            if ways > 1:
                ledger[kind, axes] = ledger.get((kind, axes), 0) + ring_wire_bytes(kind, size, ways)

        lies, columns = self.placement, self._size(self.placement.columns)
        row_bytes = FLOAT32 * self.width // columns
        if self.is_dense:
            add("all-reduce", lies.reduce_axes, INT32 * self.rows)
            add("all-gather", lies.columns, row_bytes * columns * self.rows)
            add("reduce-scatter", lies.columns, row_bytes * columns * self.rows)
            add("all-reduce", _in_order((*lies.sum_axes, *lies.reduce_axes), self.sizes), row_bytes * self.rows)
        elif lies.rows:
            self._exchanged(add, row_bytes, columns)
        else:
            add("all-gather", lies.columns, row_bytes * columns * self.distinct_rows)
            add("reduce-scatter", lies.columns, row_bytes * columns * self.distinct_rows)
            add("all-reduce", lies.sum_axes, row_bytes * self.distinct_rows)
            met = self._size(lies.reduce_axes)
            add("all-gather", lies.reduce_axes, met * self.distinct_rows * (row_bytes + INT32))
        if self.means:
            add("all-reduce", lies.columns, FLOAT32 * self.touched_rows)
        if self.key_axes is not None:
            everyone = self.ids * self._size(self.key_axes)
            add("all-gather", self.key_axes, KEY_BYTES * everyone)
            # The owners of the rows, and how many were assigned, taken and shared.
            add("all-reduce", lies.rows, INT32 * (everyone + 3))
        return ledger

    @property
    def touched_rows(self) -> int:
        """Return the maximum number of rows that a device changes in one round."""
        if self.is_dense:
            return self.rows
        ways, met = self._size(self.placement.rows), self._size(self.placement.reduce_axes)
        return met * (
            -(-math.ceil(SPARE * self.requested_rows) // ways) * ways if self.placement.rows else self.distinct_rows
        )

    def _exchanged(self, add: Any, row_bytes: int, columns: int) -> None:
        lies, ways, parts = self.placement, self._size(self.placement.rows), self._size(self.placement.request_axes)
        exchange = "ragged-all-to-all"
        add(exchange, lies.rows, INT32 * self.requested_rows)
        add(exchange, lies.rows, 2 * row_bytes * self.requested_rows)
        add("all-gather", lies.request_axes, row_bytes * parts * self.requested_rows)
        add("reduce-scatter", lies.request_axes, row_bytes * parts * self.requested_rows)
        add("all-gather", lies.columns, row_bytes * columns * parts * self.requested_rows)
        add("all-reduce", lies.sum_axes, row_bytes * columns * self.distinct_rows)
        add("reduce-scatter", lies.columns, row_bytes * columns * self.distinct_rows)
        add("all-gather", lies.reduce_axes, self.touched_rows * (row_bytes + INT32))
        # The numbers of rows of each owner, and if all fit in one round: when rows are gathered, and when
        # they are changed.
        add("all-gather", lies.rows, 2 * 2 * INT32 * ways * ways)
        add("all-reduce", lies.rows, 2 * INT32 * ways)
        add("all-reduce", lies.reduce_axes, 2 * INT32 * ways)

    def _size(self, axes: MeshAxes) -> int:
        return math.prod(self.sizes[axis] for axis in axes)


def _in_order(axes: MeshAxes, sizes: Mapping[str, int]) -> MeshAxes:
    return tuple(axis for axis in sizes if axis in axes)


def table_costs(step: CompiledStep, batch: Mapping[str, Any]) -> list[TableCost]:
    """Compute the cost of each table of a program; empty if it has none.

    Args:
        batch: A global batch, abstract or real: for a real one, distinct rows are counted.
    """
    program, placement = step.program, step.placement
    if program.tables is None:
        return []
    named, places = named_leaves(program.abstract.params), named_leaves(step.shardings.params)
    real = all(isinstance(leaf, np.ndarray) for leaf in batch.values())
    shapes = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in batch.items()}
    if program.growing is not None:
        # The rows of keys are determined during a step.
        real, shapes = False, program.growing.shapes(shapes)
    with placement.activate():
        ways = math.prod(placement.sizes[axis] for axis in token_axes())
        row_ids = jax.eval_shape(program.task.row_ids, shapes)
        grows = {each.table for each in program.task.growing}
        numbers = program.task.row_ids({k: jnp.asarray(v) for k, v in batch.items()}) if real else {}
        costs = []
        for name, axes in program.tables.axes.items():
            shape, one_device = named[name].shape, placement.devices.size == 1
            lies = TablePlacement((), (), (), ()) if one_device else TablePlacement.of(name, axes, placement)
            state = (program.abstract.tables or {}).get(name, {})
            state_places = (step.shardings.tables or {}).get(name, {})
            placed_leaves = [(named[name], places[name]), *((state[kind], state_places[kind]) for kind in state)]
            each = sum(math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, place in placed_leaves)
            max_distinct_rows = _most_distinct(np.asarray(numbers[name]), ways) if real else None
            means = program.tables.optimizer.takes_means and name in program.tables.trained
            ids = math.prod(row_ids[name].shape) // ways
            key_axes = token_axes() if name in grows else None
            costs.append(
                TableCost(
                    name, shape[0], shape[1], lies, placement.sizes, ids, max_distinct_rows, means, each, key_axes
                )
            )
    return costs


def _most_distinct(ids: np.ndarray, ways: int) -> int:
    """Count distinct ids, without -1, on the device with the most."""
    parts = ids.reshape(ways, -1) if len(ids) % ways == 0 else ids.reshape(1, -1)
    return max(len(np.unique(part[part >= 0])) for part in parts)


def table_lines(costs: list[TableCost]) -> list[str]:
    """Format the tables' part of `panax inspect`."""
    lines = []
    for cost in costs:
        where = "·".join(cost.placement.rows) or "every device"
        columns = f", columns over {'·'.join(cost.placement.columns)}" if cost.placement.columns else ""
        counted = "" if cost.counted_rows is None else f", {cost.counted_rows:,} in the first batch"
        ids = "ids" if cost.key_axes is None else "keys, which rows are given out to,"
        sent = sum(cost.sent_bytes().values())
        lines += [
            f"table          {cost.name}: {cost.rows:,} rows x {cost.width} over {where}{columns}, "
            f"{format_bytes(cost.table_bytes)} with "
            f"its optimizer on each device",
            f"               {cost.ids:,} {ids} a step on each, at most {cost.distinct_rows:,} distinct{counted}; sends up to "
            f"{format_bytes(sent)}",
        ]
    return lines
