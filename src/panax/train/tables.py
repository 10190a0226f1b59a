"""Tables in a step: the rows that a batch uses are gathered before the loss is traced, and gradients are
applied by rows.

The rows of a batch are known before its first micro-batch. They are therefore deduplicated, exchanged and
gathered once per step, and the gradients of all micro-batches accumulate in one array of these rows.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..comms import Comms
from ..core import Axes, Batch, Task, current_layout, named_leaves, pair_axes, path_name
from ..core.errors import RecipeError, suggest_name
from ..core.layout.layout import Layout
from ..core.params.logical import is_table
from ..mesh.placement import partition_entries
from ..optim import RowOptimizer, RowWiseAdagrad
from ..parallel.row_exchange import RowExchange
from ..parallel.row_placement import RowCopies, TablePlacement
from ..spmd.manual import map_over_shards
from ..spmd.row_gradients import RowGradients, update_rows
from ..spmd.rows import is_rows

TableState = Mapping[str, Mapping[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class TableUpdates:
    """The tables among a task's parameters, with their optimizer.

    Attributes:
        axes: Table name to its logical axes.
        trained: Names of the tables that are not frozen.
    """

    optimizer: RowOptimizer
    num_steps: int
    axes: Mapping[str, Axes]
    trained: frozenset[str]

    @classmethod
    def of(
        cls, task: Task, params: Any, trainable: Any, optimizer: RowOptimizer | None, num_steps: int
    ) -> "TableUpdates | None":
        """Return the tables of a task; None if it has none.

        Raises:
            RecipeError: A table optimizer is given, but there is no table to train.
        """
        named = pair_axes(params, task.parameter_axes(params))
        axes = {name: leaf_axes for name, _, leaf_axes in named if is_table(leaf_axes)}
        keeps = dict(zip((name for name, _, _ in named), jax.tree.leaves(trainable)))
        trained = frozenset(name for name in axes if keeps[name])
        if optimizer is not None and not trained:
            reason = "all tables are frozen" if axes else f"{type(task).__name__} has no tables"
            raise RecipeError(f"embedding_optimizer={type(optimizer).__name__}() has no effect: {reason}; remove it")
        return cls(optimizer or RowWiseAdagrad(), num_steps, axes, trained) if axes else None

    def check(self, task: Task, comms: Comms, layout: Layout) -> None:
        """Check that the communication settings and the mesh support tables.

        Raises:
            RecipeError: The settings or the mesh do not support tables; the message names the fix.
        """
        first = next(iter(self.axes))
        if not comms.is_plain:
            raise RecipeError(
                f"comms other than the default: gradients of the table {first!r} are rows, which are exchanged as such; "
                f"remove comms"
            )
        if math.prod(layout.sizes.values()) > 1 and not task.names_axes:
            raise RecipeError(
                f"{type(task).__name__} has the table {first!r} and names no axes, so XLA would gather the whole table on each "
                f"device; write its loss with contract and the like and set names_axes, or train on one device"
            )

    def dense_mask(self, trainable: Any) -> Any:
        """Return which parameters the dense optimizer trains, as a tree of bools with the structure of the
        parameters."""
        names = named_leaves(trainable)
        kept = [keep and name not in self.axes for name, keep in names.items()]
        return jax.tree.structure(trainable).unflatten(kept)

    def init_state(self, params: Any) -> dict[str, dict[str, jax.Array]]:
        """Create the initial optimizer state of the tables."""
        named = named_leaves(params)
        return {name: self.optimizer.init_state(named[name].shape, self.axes[name]) for name in sorted(self.trained)}

    def state_axes(self) -> dict[str, dict[str, Axes]]:
        """Return the logical axes of the tables' optimizer state."""
        return {name: self.optimizer.state_axes(self.axes[name]) for name in sorted(self.trained)}

    def ids(self, task: Task, batch: Batch) -> dict[str, jax.Array]:
        """Return the row ids that a batch reads from each table, flattened.

        Raises:
            RecipeError: A table is not read, or ids are given for a parameter that is not a table.
        """
        row_ids = task.row_ids(batch)
        lacking = [name for name in self.axes if name not in row_ids]
        if lacking:
            raise RecipeError(
                f"{type(task).__name__} has the table {lacking[0]!r} that no feature uses: its row_ids names "
                f"{', '.join(row_ids) or 'nothing'}; add its row numbers there, or remove the table"
            )
        for name, ids in row_ids.items():
            if name not in self.axes:
                raise RecipeError(
                    f"{type(task).__name__}.row_ids names {name!r}, which is not a table; {suggest_name(name, self.axes)}"
                )
            if not jnp.issubdtype(ids.dtype, jnp.integer):
                raise RecipeError(f"{type(task).__name__}.row_ids[{name!r}] is {ids.dtype}; expected int32 row numbers")
        return {name: row_ids[name].reshape(-1).astype(jnp.int32) for name in self.axes}

    def gather_rows(self, task: Task, params: Any, batch: Batch) -> "GatheredTables":
        """Replace the tables in the parameters by the rows that a batch reads.

        Args:
            params: On a mesh, this device's shards.
            batch: On a mesh, this device's rows.
        """
        ids, named = self.ids(task, batch), named_leaves(params)
        ways = {name: self._way(name, named[name].shape, table_ids.shape[0]) for name, table_ids in ids.items()}
        gathered = {name: ways[name].gather(named[name], ids[name]) for name in ids}
        opened = _with_leaves(params, {name: rows for name, (rows, _) in gathered.items()})
        return GatheredTables(opened, ways, {name: table_ids for name, (_, table_ids) in gathered.items()})

    def _way(self, name: str, shard: tuple[int, ...], ids: int) -> Any:
        layout = current_layout()
        if layout is None:
            return RowCopies.of(TablePlacement((), (), (), ()), shard, ids)
        lies = TablePlacement.of(name, self.axes[name], layout)
        return (RowExchange if lies.rows else RowCopies).of(lies, shard, ids)

    def gradient_specs(self, layout: Layout) -> dict[str, Any]:
        """Return the shardings of the row gradients, for `map_over_shards`."""
        return {name: _specs(TablePlacement.of(name, self.axes[name], layout)) for name in self.trained}

    def update(
        self,
        params: Any,
        state: TableState,
        gradients: Mapping[str, RowGradients],
        *,
        updates: jax.Array,
        applied: jax.Array | bool,
    ) -> tuple[dict[str, jax.Array], TableState]:
        """Update each table and its optimizer state.

        Args:
            updates: Number of updates applied before.
            applied: False leaves everything unchanged.
        """
        named, layout = named_leaves(params), current_layout()
        with jax.numpy_dtype_promotion("standard"):
            rate = jnp.asarray(self.optimizer.learning_rate(self.num_steps)(updates), jnp.float32)
        tables: dict[str, jax.Array] = {}
        after: dict[str, Mapping[str, jax.Array]] = {}
        for name in sorted(self.trained):
            arguments = (named[name], dict(state[name]), gradients[name], rate, updates + 1, applied)
            function = self._one(name)
            if layout is not None:
                lies = PartitionSpec(*partition_entries(layout.storage(self.axes[name])))
                state_specs = {
                    kind: PartitionSpec(*partition_entries(layout.storage(axes)))
                    for kind, axes in self.optimizer.state_axes(self.axes[name]).items()
                }
                rows = _specs(TablePlacement.of(name, self.axes[name], layout))
                replicated = PartitionSpec()
                function = map_over_shards(
                    function, layout, (lies, state_specs, rows, replicated, replicated, replicated), (lies, state_specs)
                )
            tables[name], after[name] = function(*arguments)
        return tables, after

    def _one(self, name: str) -> Callable[..., tuple[jax.Array, Any]]:
        def one(
            table: jax.Array, row_state: Any, gradients: RowGradients, rate: Any, updates: Any, applied: Any
        ) -> tuple[jax.Array, Any]:
            layout = current_layout()
            lies = (
                TablePlacement((), (), (), ()) if layout is None else TablePlacement.of(name, self.axes[name], layout)
            )
            columns = lies.columns

            def mean(numbers: jax.Array) -> jax.Array:
                here = numbers.mean(axis=1)
                return jax.lax.pmean(here, columns) if columns else here

            def change(rows: jax.Array, before: Any, gradients: jax.Array) -> tuple[jax.Array, Any]:
                wide = rows.astype(jnp.float32), before, gradients.astype(jnp.float32)
                return self.optimizer.step(*wide, rate, updates, mean)

            if gradients.later is None:
                return update_rows(table, row_state, gradients.row_ids, gradients.values, change, applied)
            num_requested = gradients.later[0].shape[0]
            exchange = RowExchange.of_sizes(lies, table.shape, num_requested, num_requested)
            return exchange.update(table, row_state, gradients, change, applied)

        return one


@dataclasses.dataclass(frozen=True)
class GatheredTables:
    """Parameters with gathered rows in place of tables.

    Attributes:
        ways: By table, how its rows are accessed (`RowCopies` or `RowExchange`).
        requests: By table, the request that is needed to return gradients.
    """

    params: Any
    ways: Mapping[str, Any]
    requests: Mapping[str, Any]

    def split_gradients(self, gradients: Any) -> tuple[Any, dict[str, RowGradients]]:
        """Split gradients with respect to `params` into (gradients with None for tables, row gradients by
        table)."""
        row_gradients = {}

        def one(path: Any, node: Any) -> Any:
            if not is_rows(node):
                return node
            if node.values is None:
                return None
            name = path_name(path)
            row_gradients[name] = self.ways[name].return_gradients(node.values, self.requests[name])
            return None

        rest = jax.tree_util.tree_map_with_path(one, gradients, is_leaf=is_rows)
        return rest, row_gradients


def _specs(lies: TablePlacement) -> RowGradients:
    columns = lies.columns or None
    rows = lies.rows or None
    later = None
    if lies.rows:
        everyone = (*lies.rows, *lies.reduce_axes)
        later = (PartitionSpec(everyone), PartitionSpec(everyone, columns))
    square = PartitionSpec() if lies.rows else None
    return _unchecked(RowGradients, PartitionSpec(rows), PartitionSpec(rows, columns), later, square)


def _unchecked(kind: type, *fields: Any) -> Any:
    """Build a module with leaves that are not arrays, bypassing its checks."""
    made = object.__new__(kind)
    for field, value in zip(dataclasses.fields(kind), fields):
        object.__setattr__(made, field.name, value)
    return made


def _with_leaves(tree: Any, leaves: Mapping[str, Any]) -> Any:
    named, structure = jax.tree.flatten(tree)
    names = list(named_leaves(tree))
    return structure.unflatten([leaves.get(name, leaf) for name, leaf in zip(names, named)])


def replace_tables(params: Any, tables: Mapping[str, jax.Array]) -> Any:
    """Replace tables in the parameters."""
    return _with_leaves(params, tables)


def table_norm(norm: jax.Array, gradients: Mapping[str, RowGradients] | None) -> jax.Array:
    """Compute the norm of the whole gradient from that of its dense part and the row gradients, if any."""
    if not gradients:
        return norm
    return jnp.sqrt(jnp.square(norm) + sum((one.square for one in gradients.values()), jnp.float32(0.0)))


def scale_rows(gradients: Mapping[str, RowGradients], factor: jax.Array) -> dict[str, RowGradients]:
    """Multiply all row gradients by `factor`."""
    return {name: one.scale(factor) for name, one in gradients.items()}
