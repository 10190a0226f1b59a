"""Tables whose rows are given out in a step's beginning, before anything of it reads them: `parallel/vocabulary.py` says how."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from ..core import Axes, Batch, Task, TrainState, current_layout, named_leaves
from ..core.counter_hash import bits_of_places, centred
from ..core.errors import LayoutError, RecipeError, nearest
from ..core.growing import Growing
from ..core.layout import Layout
from ..mesh.placement import as_spec
from ..parallel.row_places import Lies
from ..parallel.vocabulary import Blocks, Decided, Vocabulary
from ..spmd.manual import on_each_device
from .tables import Tables, with_tables

BatchAxes = Mapping[str, Axes]
Counts = Mapping[str, jax.Array]

WORDS = 2
"""Of 32 bits, which a key has."""


@dataclasses.dataclass(frozen=True)
class GrowingTables:
    """Those of a task, and how their rows are given out."""

    tables: Tables
    growing: tuple[Growing, ...]

    @classmethod
    def of(cls, task: Task, tables: Tables | None) -> "GrowingTables | None":
        """None where a task has none.

        Raises:
            RecipeError: What is to grow is not a table, or is frozen, or two vocabularies have one name.
        """
        if not task.growing:
            return None
        known = {} if tables is None else tables.axes
        names = [each.vocabulary for each in task.growing]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise RecipeError(
                f"two tables of {type(task).__name__} have the vocabulary {twice!r}; give one of the tables another name"
            )
        for each in task.growing:
            if each.table not in known:
                raise RecipeError(
                    f"{type(task).__name__} has a vocabulary for {each.table!r}, which is not a table; "
                    f"{nearest(each.table, known)}"
                )
            assert tables is not None
            if each.table not in tables.trained:
                raise RecipeError(
                    f"the table {each.table!r} has a vocabulary that grows, and is frozen; train it, or take ids that are fixed"
                )
        assert tables is not None
        return cls(tables, task.growing)

    def given(
        self, state: TrainState, batch: Batch, axes: BatchAxes
    ) -> tuple[TrainState, dict[str, jax.Array], dict[str, Axes], Counts]:
        """The state in which each key of a batch has a row, the batch with row numbers in the keys' places, its axes, and counts:
        `vocabulary/NAME/given`, `taken` and `crowded`, as `Decided` says.

        Rows that are given out have their first numbers, and what an optimizer keeps of them is as before the first update. They
        are given out whether or not the update of this step is applied.
        """
        counts: dict[str, jax.Array] = {}
        for each in self.growing:
            self._check(each, batch)
            named = named_leaves(state.params)
            table, kept = named[each.table], dict((state.tables or {})[each.table])
            vocabulary = _vocabulary(state.model_state, each)
            leaves = {leaf: batch[leaf] for leaf in each.leaves}
            seed = jax.random.bits(state.key, (), jnp.uint32)
            function = self._giving(each)
            arguments = (table, kept, vocabulary, leaves, state.step, seed)
            layout = current_layout()
            if layout is not None:
                lies, held, rows, ids = self._specs(each, layout, kept, leaves, axes)
                whole = PartitionSpec()
                function = on_each_device(
                    function,
                    layout,
                    (lies, held, rows, {leaf: ids[leaf][0] for leaf in leaves}, whole, whole),
                    (lies, held, rows, {leaf: ids[leaf][1] for leaf in leaves}, [whole] * 3),
                )
            table, kept, vocabulary, numbers, found = function(*arguments)
            counts |= {
                f"vocabulary/{each.vocabulary}/{name}": n for name, n in zip(("given", "taken", "crowded"), found)
            }
            batch, axes = _with_numbers(batch, axes, numbers)
            state = dataclasses.replace(
                state,
                params=with_tables(state.params, {each.table: table}),
                tables={**(state.tables or {}), each.table: kept},
                model_state={**state.model_state, each.vocabulary: vocabulary._asdict()},
            )
        return state, dict(batch), dict(axes), counts

    def found(self, state: TrainState, batch: Batch, axes: BatchAxes) -> tuple[dict[str, jax.Array], dict[str, Axes]]:
        """The batch with row numbers in the keys' places, -1 for a key without a row; and its axes."""
        for each in self.growing:
            self._check(each, batch)
            vocabulary = _vocabulary(state.model_state, each)
            leaves = {leaf: batch[leaf] for leaf in each.leaves}
            function: Callable[..., Any] = self._finding(each)
            layout = current_layout()
            if layout is not None:
                _, _, rows, ids = self._specs(each, layout, {}, leaves, axes)
                function = on_each_device(
                    function,
                    layout,
                    (rows, {leaf: ids[leaf][0] for leaf in leaves}),
                    {leaf: ids[leaf][1] for leaf in leaves},
                )
            batch, axes = _with_numbers(batch, axes, function(vocabulary, leaves))
        return dict(batch), dict(axes)

    def shapes(self, batch: Batch) -> dict[str, Any]:
        """The shapes of a batch with row numbers in the keys' places."""
        keyed = {leaf for each in self.growing for leaf in each.leaves}
        return {
            name: jax.ShapeDtypeStruct(leaf.shape[:-1], jnp.int32) if name in keyed else leaf
            for name, leaf in batch.items()
        }

    def _check(self, each: Growing, batch: Batch) -> None:
        for leaf in each.leaves:
            found = batch.get(leaf)
            if found is None:
                raise RecipeError(
                    f"the vocabulary {each.vocabulary!r} is of the batch leaf {leaf!r}, and the batch has "
                    f"{', '.join(sorted(batch))}; add it to the data"
                )
            if found.ndim != 3 or found.shape[-1] != WORDS or found.dtype != jnp.uint32:
                raise RecipeError(
                    f"the batch leaf {leaf!r} is {found.dtype} of shape {list(found.shape)}; expected keys for the vocabulary "
                    f"{each.vocabulary!r}: uint32 (batch, ids, {WORDS}), as Bag(ids=Keys()) gives them"
                )

    def _specs(
        self, each: Growing, layout: Layout, kept: Any, leaves: Any, axes: BatchAxes
    ) -> tuple[PartitionSpec, dict[str, PartitionSpec], Vocabulary, dict[str, list[PartitionSpec]]]:
        """Where the table lies, what is kept of it, its vocabulary, and each leaf of keys and of numbers."""

        def spec(dims: Any) -> PartitionSpec:
            return PartitionSpec(*as_spec(dims))

        own = self.tables.axes[each.table]
        kinds = self.tables.kept_axes()[each.table]
        held = {kind: spec(layout.storage(kinds[kind])) for kind in kept}
        rows = Vocabulary._make([spec(layout.storage((own[0], None))), spec(layout.storage(own[:1]))])
        ids = {
            leaf: [spec(layout.compute(axes[leaf])), spec(layout.compute(tuple(axes[leaf])[:-1]))] for leaf in leaves
        }
        return spec(layout.storage(own)), held, rows, ids

    def _blocks(self, each: Growing, vocabulary: Vocabulary) -> Blocks:
        """
        Raises:
            LayoutError: The table's columns are split, so that no device holds a row.
        """
        layout = current_layout()
        lies = Lies((), (), (), ()) if layout is None else Lies.of(each.table, self.tables.axes[each.table], layout)
        if lies.columns:
            raise LayoutError(
                f"the table {each.table!r} grows, and its columns are split over {', '.join(lies.columns)}; split its rows "
                f"alone, since the device that gives out a row holds all of it"
            )
        return Blocks.of(lies, vocabulary.keys.shape, each.ways, each.idle_steps)

    def _giving(self, each: Growing) -> Callable[..., Any]:
        def one(
            table: jax.Array, kept: Any, vocabulary: Vocabulary, leaves: Any, step: jax.Array, seed: jax.Array
        ) -> tuple[Any, ...]:
            blocks = self._blocks(each, vocabulary)
            rows, vocabulary, decided = blocks.given(vocabulary, _together(leaves), step)
            first = first_rows(decided.keys, table.shape[1], seed, each.scale)
            table = _put(table, decided, first)
            begun = self.tables.optimizer.first_state(first.shape, self.tables.axes[each.table])
            kept = {kind: _put(leaf, decided, begun[kind]) for kind, leaf in kept.items()}
            counts = [decided.given, decided.taken, decided.crowded]
            return table, kept, vocabulary, _apart(rows, leaves), counts

        return one

    def _finding(self, each: Growing) -> Callable[..., Any]:
        def one(vocabulary: Vocabulary, leaves: Any) -> dict[str, jax.Array]:
            rows = self._blocks(each, vocabulary).found(vocabulary, _together(leaves))
            return _apart(rows, leaves)

        return one


def first_rows(
    keys: UInt32[Array, "keys 2"], width: int, seed: UInt32[Array, ""], scale: float
) -> Float[Array, "keys row_width"]:
    """The first numbers of each key's row, a hash of the key: the same whatever row it gets, and whenever."""
    column = jnp.arange(width, dtype=jnp.int32)
    bits = bits_of_places("key", seed, [keys[:, :1], keys[:, 1:], column[None, :]])
    return centred(bits) * jnp.float32(scale)


def _put(whole: jax.Array, decided: Decided, part: jax.Array) -> jax.Array:
    return whole.at[decided.rows].set(part.astype(whole.dtype), mode="drop", unique_indices=True)


def _vocabulary(model_state: Any, each: Growing) -> Vocabulary:
    return Vocabulary(**model_state[each.vocabulary])


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
