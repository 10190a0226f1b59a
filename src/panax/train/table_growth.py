"""Growing tables in a step: rows are assigned to new keys before anything reads them; see
`parallel/vocabulary.py`."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from ..core import Axes, Batch, Task, TrainState, current_layout, named_leaves
from ..core.errors import LayoutError, RecipeError, suggest_name
from ..core.layout.declarations import declare_trip_count
from ..core.layout.layout import Layout
from ..core.params.counter_rng import element_bits, to_centered_uniform
from ..core.params.growth import GrowingVocab
from ..mesh.placement import partition_entries
from ..parallel.row_placement import TablePlacement
from ..parallel.vocabulary import ShardVocabulary, VocabularyBlocks, VocabularyLookup
from ..spmd.in_place import read_before_write
from ..spmd.manual import map_over_shards
from .tables import TableUpdates, replace_tables

BatchAxes = Mapping[str, Axes]
Counts = Mapping[str, jax.Array]

WORDS = 2
"""Number of 32-bit words in a key."""


class RowsBefore(NamedTuple):
    """State of one table before rows were assigned, for the rows that a step uses.

    Attributes:
        rows: The assigned rows, each once; padded with the shard's number of rows.
        values: Their previous values.
        optimizer_state: Their previous optimizer state, by kind.
        lookup: The previous vocabulary entries of the rows used.
    """

    rows: jax.Array
    values: jax.Array
    optimizer_state: dict[str, jax.Array]
    lookup: VocabularyLookup


class AssignedBatch(NamedTuple):
    """Inputs of a step after rows are assigned.

    Attributes:
        state: The state, with a row for each key of the batch.
        batch: The batch, with row indices in place of keys.
        axes: The logical axes of the batch.
        counts: `vocabulary/NAME/given`, `taken` and `crowded`: `num_assigned`, `num_evicted` and `num_crowded`
            of `RowAssignments`.
        before: By table, the input of `roll_back`.
    """

    state: TrainState
    batch: dict[str, jax.Array]
    axes: dict[str, Axes]
    counts: Counts
    before: Mapping[str, RowsBefore]


@dataclasses.dataclass(frozen=True)
class GrowingTables:
    """The growing tables of a task, with the assignment of their rows."""

    tables: TableUpdates
    growing: tuple[GrowingVocab, ...]

    @classmethod
    def of(cls, task: Task, tables: TableUpdates | None) -> "GrowingTables | None":
        """Return the growing tables of a task; None if it has none.

        Raises:
            RecipeError: A growing parameter is not a table or is frozen, or two vocabularies have the same
                name.
        """
        if not task.growing:
            return None
        known = {} if tables is None else tables.axes
        names = [each.vocabulary for each in task.growing]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise RecipeError(
                f"two tables of {type(task).__name__} have the vocabulary {twice!r}; rename one of the tables"
            )
        for each in task.growing:
            if each.table not in known:
                raise RecipeError(
                    f"{type(task).__name__} has a vocabulary for {each.table!r}, which is not a table; "
                    f"{suggest_name(each.table, known)}"
                )
            assert tables is not None
            if each.table not in tables.trained:
                raise RecipeError(
                    f"the table {each.table!r} has a vocabulary that grows, and is frozen; train it, or use ids that are fixed"
                )
        assert tables is not None
        return cls(tables, task.growing)

    def check_mesh(self, layout: Layout, params: Any) -> None:
        """Check that each device holds whole blocks of every table.

        Args:
            params: Abstract, global.

        Raises:
            LayoutError: A table does not divide; the message names it, and a sufficient number of rows.
        """
        for each in self.growing:
            rows = named_leaves(params)[each.table].shape[0]
            split = layout.storage(self.tables.axes[each.table], named_leaves(params)[each.table].shape)[0]
            devices = math.prod(layout.sizes[axis] for axis in split)
            blocks = rows // each.ways
            if blocks % devices:
                enough = -(-blocks // devices) * devices * each.ways
                raise LayoutError(
                    f"the table {each.vocabulary!r} has {blocks} blocks of ways={each.ways} rows, which don't divide over "
                    f'{devices} devices; set rows={enough:,}, smaller blocks, or placement="everywhere"'
                )

    def assign_rows(self, state: TrainState, batch: Batch, axes: BatchAxes) -> "AssignedBatch":
        """Assign a row to each key of a batch; newly assigned rows get initial values and initial optimizer
        state."""
        counts: dict[str, jax.Array] = {}
        before: dict[str, RowsBefore] = {}
        for each in self.growing:
            self._check(each, batch)
            named = named_leaves(state.params)
            table, row_state = named[each.table], dict((state.tables or {})[each.table])
            vocabulary = _vocabulary(state.model_state, each)
            leaves = {leaf: batch[leaf] for leaf in each.leaves}
            seed = jax.random.bits(state.key, (), jnp.uint32)
            function = self._giving(each)
            arguments = (table, row_state, vocabulary, leaves, state.step, seed)
            layout = current_layout()
            if layout is not None:
                lies, state_specs, rows, ids = self._specs(each, layout, row_state, leaves, axes)
                replicated = PartitionSpec()
                function = map_over_shards(
                    function,
                    layout,
                    (lies, state_specs, rows, {leaf: ids[leaf][0] for leaf in leaves}, replicated, replicated),
                    (
                        lies,
                        state_specs,
                        rows,
                        {leaf: ids[leaf][1] for leaf in leaves},
                        [replicated] * 3,
                        _before(rows, row_state),
                    ),
                )
            table, row_state, vocabulary, numbers, num_keys, before[each.table] = function(*arguments)
            counts |= {
                f"vocabulary/{each.vocabulary}/{name}": n for name, n in zip(("given", "taken", "crowded"), num_keys)
            }
            batch, axes = _with_numbers(batch, axes, numbers)
            state = _with(state, each, table, row_state, vocabulary)
        return AssignedBatch(state, dict(batch), dict(axes), counts, before)

    def roll_back(self, state: TrainState, before: Mapping[str, "RowsBefore"], undo: jax.Array) -> TrainState:
        """Restore the state before rows were assigned, bitwise, if `undo` is True.

        Args:
            state: If `undo`, no other rows may have changed since then.
        """
        for each in self.growing:
            table, row_state = named_leaves(state.params)[each.table], dict((state.tables or {})[each.table])
            vocabulary = _vocabulary(state.model_state, each)
            function: Callable[..., Any] = _undone
            layout = current_layout()
            if layout is not None:
                lies, state_specs, rows, _ = self._specs(each, layout, row_state, {}, {})
                places = lies, state_specs, rows
                function = map_over_shards(
                    function, layout, (*places, _before(rows, row_state), PartitionSpec()), places
                )
            table, row_state, vocabulary = function(table, row_state, vocabulary, before[each.table], undo)
            state = _with(state, each, table, row_state, vocabulary)
        return state

    def lookup_rows(
        self, state: TrainState, batch: Batch, axes: BatchAxes
    ) -> tuple[dict[str, jax.Array], dict[str, Axes]]:
        """Replace the keys of a batch by row indices, -1 for a key without a row; also return its axes."""
        for each in self.growing:
            self._check(each, batch)
            vocabulary = _vocabulary(state.model_state, each)
            leaves = {leaf: batch[leaf] for leaf in each.leaves}
            function: Callable[..., Any] = self._finding(each)
            layout = current_layout()
            if layout is not None:
                _, _, rows, ids = self._specs(each, layout, {}, leaves, axes)
                function = map_over_shards(
                    function,
                    layout,
                    (rows, {leaf: ids[leaf][0] for leaf in leaves}),
                    {leaf: ids[leaf][1] for leaf in leaves},
                )
            batch, axes = _with_numbers(batch, axes, function(vocabulary, leaves))
        return dict(batch), dict(axes)

    def shapes(self, batch: Batch) -> dict[str, Any]:
        """Return the shapes of a batch with row indices in place of keys."""
        keyed = {leaf for each in self.growing for leaf in each.leaves}
        return {
            name: jax.ShapeDtypeStruct(leaf.shape[:-1], jnp.int32) if name in keyed else leaf
            for name, leaf in batch.items()
        }

    def _check(self, each: GrowingVocab, batch: Batch) -> None:
        for leaf in each.leaves:
            keys = batch.get(leaf)
            if keys is None:
                raise RecipeError(
                    f"the vocabulary {each.vocabulary!r} is of the batch leaf {leaf!r}, and the batch has "
                    f"{', '.join(sorted(batch))}; add it to the data"
                )
            if keys.ndim != 3 or keys.shape[-1] != WORDS or keys.dtype != jnp.uint32:
                raise RecipeError(
                    f"the batch leaf {leaf!r} is {keys.dtype} of shape {list(keys.shape)}; expected keys for the vocabulary "
                    f"{each.vocabulary!r}: uint32 (batch, ids, {WORDS}), as Bag(ids=HashedIds()) gives them"
                )

    def _specs(
        self, each: GrowingVocab, layout: Layout, state_arrays: Any, leaves: Any, axes: BatchAxes
    ) -> tuple[PartitionSpec, dict[str, PartitionSpec], ShardVocabulary, dict[str, list[PartitionSpec]]]:
        """Return the shardings of the table, its optimizer state, its vocabulary, and each leaf of keys and
        of row indices."""

        def spec(dims: Any) -> PartitionSpec:
            return PartitionSpec(*partition_entries(dims))

        table_axes = self.tables.axes[each.table]
        kinds = self.tables.state_axes()[each.table]
        state_specs = {kind: spec(layout.storage(kinds[kind])) for kind in state_arrays}
        rows = ShardVocabulary._make(
            [spec(layout.storage((table_axes[0], None))), spec(layout.storage(table_axes[:1]))]
        )
        ids = {
            leaf: [spec(layout.compute(axes[leaf])), spec(layout.compute(tuple(axes[leaf])[:-1]))] for leaf in leaves
        }
        return spec(layout.storage(table_axes)), state_specs, rows, ids

    def _blocks(self, each: GrowingVocab, vocabulary: ShardVocabulary) -> VocabularyBlocks:
        """Describe a table's vocabulary on this device.

        Raises:
            LayoutError: The table's columns are sharded, so that no device holds a whole row.
        """
        layout = current_layout()
        lies = (
            TablePlacement((), (), (), ())
            if layout is None
            else TablePlacement.of(each.table, self.tables.axes[each.table], layout)
        )
        if lies.columns:
            raise LayoutError(
                f"the table {each.table!r} grows, and its columns are split over {', '.join(lies.columns)}; split its rows "
                f"alone, since the device that gives out a row holds all of it"
            )
        return VocabularyBlocks.of(lies, vocabulary.keys.shape, each.ways, each.idle_steps)

    def _giving(self, each: GrowingVocab) -> Callable[..., Any]:
        def one(
            table: jax.Array, row_state: Any, vocabulary: ShardVocabulary, leaves: Any, step: jax.Array, seed: jax.Array
        ) -> tuple[Any, ...]:
            blocks = self._blocks(each, vocabulary)
            rows, vocabulary, decided = blocks.assign(vocabulary, _together(leaves), step)
            first = init_rows(decided.keys, table.shape[1], seed, each.scale)
            initial_state = self.tables.optimizer.init_state(first.shape, self.tables.axes[each.table])
            were, place = read_before_write(table, decided.rows, decided.rows)
            before = RowsBefore(decided.rows, were, {}, decided.before)
            table, after = _put(table, place, first), {}
            for kind, leaf in row_state.items():
                before.optimizer_state[kind], place = read_before_write(leaf, decided.rows, decided.rows)
                after[kind] = _put(leaf, place, initial_state[kind])
            counts = [decided.num_assigned, decided.num_evicted, decided.num_crowded]
            return table, after, vocabulary, _apart(rows, leaves), counts, before

        return one

    def _finding(self, each: GrowingVocab) -> Callable[..., Any]:
        def one(vocabulary: ShardVocabulary, leaves: Any) -> dict[str, jax.Array]:
            rows = self._blocks(each, vocabulary).lookup(vocabulary, _together(leaves))
            return _apart(rows, leaves)

        return one


def init_rows(
    keys: UInt32[Array, "keys 2"], width: int, seed: UInt32[Array, ""], scale: float
) -> Float[Array, "keys row_width"]:
    """Compute the initial values of each key's row as a hash of the key, independent of the row and the time
    of assignment."""
    column = jnp.arange(width, dtype=jnp.int32)
    bits = element_bits("key", seed, [keys[:, :1], keys[:, 1:], column[None, :]])
    return to_centered_uniform(bits) * jnp.float32(scale)


def _put(whole: jax.Array, rows: jax.Array, part: jax.Array) -> jax.Array:
    return whole.at[rows].set(part.astype(whole.dtype), mode="drop", unique_indices=True)


def _undone(
    table: jax.Array,
    row_state: Mapping[str, jax.Array],
    vocabulary: ShardVocabulary,
    before: RowsBefore,
    undo: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array], ShardVocabulary]:
    """Restore the rows on one device.

    A loop of zero or one iterations updates the table in place; a branch would copy it.
    """

    def one(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        table, row_state, vocabulary = carry[1]
        table = _put(table, before.rows, before.values)
        row_state = {kind: _put(leaf, before.rows, before.optimizer_state[kind]) for kind, leaf in row_state.items()}
        keys = _put(vocabulary.keys, before.lookup.rows, before.lookup.keys)
        last_used = _put(vocabulary.asked, before.lookup.rows, before.lookup.asked)
        return jnp.bool_(False), (table, row_state, ShardVocabulary(keys, last_used))

    with declare_trip_count(0, 1):
        return jax.lax.while_loop(lambda carry: carry[0], one, (undo, (table, dict(row_state), vocabulary)))[1]


def _before(rows: ShardVocabulary, state_arrays: Mapping[str, Any]) -> RowsBefore:
    """Return the shardings of `RowsBefore`, which follow the rows of each shard."""
    places: Any = rows.asked
    kinds: dict[str, Any] = dict.fromkeys(state_arrays, places)
    return RowsBefore(places, places, kinds, VocabularyLookup(places, places, places))


def _with(
    state: TrainState,
    each: GrowingVocab,
    table: jax.Array,
    row_state: Mapping[str, jax.Array],
    vocabulary: ShardVocabulary,
) -> TrainState:
    return dataclasses.replace(
        state,
        params=replace_tables(state.params, {each.table: table}),
        tables={**(state.tables or {}), each.table: row_state},
        model_state={**state.model_state, each.vocabulary: vocabulary._asdict()},
    )


def _vocabulary(model_state: Any, each: GrowingVocab) -> ShardVocabulary:
    return ShardVocabulary(**model_state[each.vocabulary])


def _together(leaves: Mapping[str, jax.Array]) -> UInt32[Array, "ids 2"]:
    return jnp.concatenate([leaf.reshape(-1, WORDS) for leaf in leaves.values()])


def _apart(rows: Int[Array, " ids"], leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    found, at = {}, 0
    for name, leaf in leaves.items():
        count = leaf.shape[0] * leaf.shape[1]
        found[name] = rows[at : at + count].reshape(leaf.shape[:2])
        at += count
    return found


def _with_numbers(
    batch: Batch, axes: BatchAxes, numbers: Mapping[str, jax.Array]
) -> tuple[dict[str, jax.Array], dict[str, Axes]]:
    return {**batch, **numbers}, {**axes, **{name: tuple(axes[name])[:-1] for name in numbers}}
