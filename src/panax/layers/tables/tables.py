"""Embedding tables of a recommender: which features read which table, how tables of equal width are stacked,
and their placement."""

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...core import Batch, Module, parameter
from ...core.batch_checks import UNCHECKED_RANGE, LeafRange, id_range
from ...core.errors import RecipeError
from ...core.params.growth import GrowingVocab
from ...core.params.module import name_key
from ...core.protocols import Axes
from ...core.validation import Validated
from ...parallel.row_placement import TablePlacement
from ...parallel.vocabulary import ShardVocabulary, VocabularyBlocks
from .bags import embedding_rows, pool_rows
from .stacked_tables import StackPlan, TablePart, init_stack, plan_stack
from .table_config import MAX_ROWS, FeatureConfig, TableConfig


class RowTable(Module):
    """Stacked tables with rows sharded over the whole mesh."""

    table: Float[Array, "row row_width"] = parameter(lambda *_: jnp.zeros(()))


class ColumnTable(Module):
    """Stacked tables with columns sharded over the tensor axis and rows over the others."""

    table: Float[Array, "row_of_columns row_columns"] = parameter(lambda *_: jnp.zeros(()))


class SmallTable(Module):
    """Stacked tables replicated on every device."""

    table: Float[Array, "row_everywhere row_width"] = parameter(lambda *_: jnp.zeros(()))


_KINDS: Mapping[str, type[RowTable] | type[ColumnTable] | type[SmallTable]] = MappingProxyType(
    {"rows": RowTable, "columns": ColumnTable, "everywhere": SmallTable}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablesConfig(Validated):
    """Settings of all tables of a model.

    Attributes:
        small_bytes: Maximum size in bytes of a table to replicate on every device, if its placement is auto.
        in_params: Path of the model's `EmbeddingTables`, in the format of parameter names.
    """

    tables: tuple[TableConfig, ...]
    small_bytes: int = 2**18
    in_params: str = "tables"

    def __post_init__(self) -> None:
        named: dict[str, TableConfig] = {}
        read: dict[str, str] = {}
        if not self.tables:
            raise RecipeError("tables is empty; expected one TableConfig or more")
        if self.small_bytes < 0:
            raise RecipeError(f"small_bytes={self.small_bytes}; expected 0 or more")
        for table in self.tables:
            other = named.setdefault(table.name, table)
            if other is not table:
                widths = f" of width {other.width} and of width {table.width}" if other.width != table.width else ""
                raise RecipeError(
                    f"two tables are named {table.name!r}{widths}; features that share a table are listed in one, which has one "
                    f"width: for two widths use two names"
                )
            for feature in table.features:
                if feature.leaf in read:
                    raise RecipeError(
                        f"the batch leaf {feature.leaf!r} is a feature of the tables {read[feature.leaf]!r} and {table.name!r}; "
                        f"give the batch a second leaf of that content, with another name"
                    )
                read[feature.leaf] = table.name

    @property
    def stacks(self) -> tuple[StackPlan, ...]:
        """Tables grouped by width and placement into one parameter each, up to the int32 limit of rows."""
        groups: dict[tuple[int, str, int], list[TablePart]] = {}
        full: dict[tuple[int, str], int] = {}
        for placement, part in self._parts():
            kind = part.table.width, placement
            if part.table.growth is not None:
                # Rows of a growing table are addressed by key hashes, so it needs a separate stack.
                groups[(*kind, -1 - len(groups))] = [part]
                continue
            number = full.get(kind, 0)
            if sum(each.rows for each in groups.get((*kind, number), ())) + part.rows > MAX_ROWS:
                full[kind] = number = number + 1
            groups.setdefault((*kind, number), []).append(part)
        return tuple(plan_stack(tuple(parts), placement) for (_, placement, _), parts in groups.items())

    def _parts(self) -> Iterator[tuple[str, TablePart]]:
        for table in self.tables:
            placement, hot = self.resolve_placement(table), table.hot_rows
            # With rows=0, the number of rows is only known once the data is.
            if hot and table.rows:
                if placement == "everywhere":
                    raise RecipeError(
                        f"the table {table.name!r} has hot_rows={hot:,}, and is replicated on every device, since its "
                        f"{table.bytes:,} bytes are at most small_bytes={self.small_bytes:,}; remove hot_rows"
                    )
                yield "everywhere", TablePart(table, 0, hot)
                yield placement, TablePart(table, hot, table.rows - hot)
            else:
                yield placement, TablePart(table, 0, table.rows)

    def resolve_placement(self, table: TableConfig) -> str:
        if table.placement != "auto":
            return table.placement
        return "everywhere" if table.bytes <= self.small_bytes else "rows"

    def adapt_to_data(self, num_ids: Mapping[str, int]) -> "TablesConfig":
        """Return these tables with rows=0 replaced by the data's number of ids.

        Args:
            num_ids: Batch leaf to its number of ids, according to the data.

        Raises:
            RecipeError: A table has fewer rows than the data has ids, or the data does not specify how many.
        """
        return dataclasses.replace(self, tables=tuple(_adapted(table, num_ids) for table in self.tables))

    @property
    def leaf_ranges(self) -> dict[str, LeafRange]:
        """The valid values of each feature's leaves, in the form of `Task.leaf_ranges`."""
        ranges = {}
        for table in self.tables:
            for feature in table.features:
                if table.growth is None:
                    ranges[feature.leaf] = id_range(
                        table.rows, least=-1, advice=f"give the table {table.name!r} more rows"
                    )
                if feature.weights_leaf:
                    ranges[feature.weights_leaf] = UNCHECKED_RANGE
        return ranges

    @property
    def batch_axes(self) -> dict[str, Axes]:
        """The logical axes of each feature's leaves, in the form of `Task.batch_axes`."""
        features = [feature for table in self.tables for feature in table.features]
        leaves = [leaf for f in features for leaf in (f.leaf, f.weights_leaf) if leaf]
        keys = [feature.leaf for table in self.tables if table.growth is not None for feature in table.features]
        return {**dict.fromkeys(leaves, ("batch", None)), **dict.fromkeys(keys, ("batch", None, None))}

    @property
    def growing(self) -> tuple[GrowingVocab, ...]:
        """The growing tables, in the form of `Task.growing`; a vocabulary has its table's name."""
        return tuple(
            GrowingVocab(
                f"{self.in_params}.stacks.{n}.table",
                table.name,
                tuple(feature.leaf for feature in table.features),
                table.growth.ways,
                table.growth.idle_steps,
                plan.rows**-0.5,
            )
            for n, plan in enumerate(self.stacks)
            for table in (plan.parts[0].table,)
            if table.growth is not None
        )

    def init_vocabularies(self) -> dict[str, dict[str, Array]]:
        """Create the empty vocabularies of the growing tables, as a mapping that is part of the model
        state."""
        return {
            plan.parts[0].table.name: {
                "keys": jnp.zeros((plan.rows, 2), jnp.uint32),
                "asked": jnp.full(plan.rows, -1, jnp.int32),
            }
            for plan in self.stacks
            if plan.growth is not None
        }

    def vocabulary_axes(self) -> dict[str, dict[str, Axes]]:
        """Return the logical axes of the vocabularies."""
        return {
            plan.parts[0].table.name: {"keys": (axis, None), "asked": (axis,)}
            for plan in self.stacks
            if plan.growth is not None
            for axis in ("row_everywhere" if plan.placement == "everywhere" else "row",)
        }

    def replace_keys(self, vocabularies: Mapping[str, Mapping[str, Array]], batch: Batch) -> dict[str, Any]:
        """Replace a batch's keys by row indices, -1 for a key without a row, on one device; for evaluation.

        Args:
            vocabularies: Vocabularies by name, as from `init_vocabularies`; the whole model state works too.

        Raises:
            RecipeError: The vocabulary of a growing table is missing.
        """
        new_batch = dict(batch)
        for each in self.growing:
            if each.vocabulary not in vocabularies:
                raise RecipeError(
                    f"the table {each.vocabulary!r} grows, but its vocabulary is missing; pass the model state of the training"
                )
            vocabulary = ShardVocabulary(
                **{name: jnp.asarray(leaf) for name, leaf in vocabularies[each.vocabulary].items()}
            )
            blocks = VocabularyBlocks.of(
                TablePlacement((), (), (), ()), vocabulary.keys.shape, each.ways, each.idle_steps
            )
            for leaf in each.leaves:
                keys = jnp.asarray(batch[leaf])
                new_batch[leaf] = blocks.lookup(vocabulary, keys.reshape(-1, 2)).reshape(keys.shape[:-1])
        return new_batch

    def row_ids(self, batch: Batch) -> dict[str, Int[Array, "batch ids"]]:
        """Return the row indices that a batch reads, in the form of `Task.row_ids`.

        Raises:
            RecipeError: The batch lacks a feature, or its bags have another capacity.
        """
        self.check(batch)
        return {f"{self.in_params}.stacks.{n}.table": plan.positions(batch) for n, plan in enumerate(self.stacks)}

    def check(self, batch: Batch) -> None:
        """Check that the batch has every feature, with its capacity.

        Raises:
            RecipeError: The batch lacks a feature, or its bags have another capacity.
        """
        for table in self.tables:
            for feature in table.features:
                for leaf in (feature.leaf, feature.weights_leaf):
                    if leaf and leaf not in batch:
                        raise RecipeError(
                            f"the table {table.name!r} is read by the batch leaf {leaf!r}, and the batch has "
                            f"{', '.join(sorted(batch))}; add it to the data"
                        )
                    if leaf and batch[leaf].shape[1:] != (feature.capacity,):
                        raise RecipeError(
                            f"the batch leaf {leaf!r} has the shape {list(batch[leaf].shape)}, and its feature "
                            f"capacity={feature.capacity}; expected (batch, {feature.capacity})"
                        )

    def create(self, key: jax.Array) -> "EmbeddingTables":
        """Initialize all tables, uniformly within ±sqrt(1 / rows) of each."""
        stacks = tuple(
            _KINDS[plan.placement](table=init_stack(name_key(key, f"stack {n}"), plan))
            for n, plan in enumerate(self.stacks)
        )
        return EmbeddingTables(stacks=stacks, config=self)


class EmbeddingTables(Module):
    """All tables of a model, as parameters.

    tables = TablesConfig(tables=(TableConfig(name="item", rows=1000, width=8, features=(FeatureConfig(leaf="item"),)),))
    model = tables.create(key)
    vectors = model(batch)["item"]
    """

    stacks: tuple[Any, ...]
    config: TablesConfig = dataclasses.field(metadata={"static": True})

    def __call__(self, batch: Batch) -> dict[str, Float[Array, "batch row_width"]]:
        """Compute a vector per example for each feature, by its leaf; zeros for an empty bag."""
        self.config.check(batch)
        bags: dict[str, tuple[FeatureConfig, jax.Array]] = {}
        for plan, stack in zip(self.config.stacks, self.stacks):
            rows = embedding_rows(stack.table, plan.positions(batch))
            first = 0
            for feature, _, _ in plan.features:
                bag = rows[:, first : first + feature.capacity]
                # If a table is in two parts, the part without the row gives zeros.
                bags[feature.leaf] = feature, bag + bags[feature.leaf][1] if feature.leaf in bags else bag
                first += feature.capacity
        vectors: dict[str, jax.Array] = {}
        for leaf, (feature, bag) in bags.items():
            weights = batch[feature.weights_leaf] if feature.weights_leaf else None
            vectors[leaf] = pool_rows(bag, batch[leaf], pooling=feature.pooling, weights=weights)
        return vectors

    def row_ids(self, batch: Batch) -> dict[str, Int[Array, "batch ids"]]:
        """Return the row indices that a batch reads, as `TablesConfig.row_ids` does."""
        return self.config.row_ids(batch)


def _adapted(table: TableConfig, num_ids: Mapping[str, int]) -> TableConfig:
    if table.growth is not None:
        return table
    leaves = [feature.leaf for feature in table.features]
    data_ids = max((num_ids.get(leaf, 0) for leaf in leaves), default=0)
    if table.rows == 0 and not data_ids:
        raise RecipeError(
            f"the table {table.name!r} has rows=0, which takes the data's number of ids, but the data does not state how many "
            f"{' and '.join(map(repr, leaves))} may hold; set a number"
        )
    if data_ids and table.hot_rows >= data_ids:
        raise RecipeError(
            f"the table {table.name!r} has hot_rows={table.hot_rows:,}, and the data {data_ids:,} ids; expected fewer"
        )
    if 0 < table.rows < data_ids:
        raise RecipeError(
            f"the table {table.name!r} has rows={table.rows:,}, and the data's {' and '.join(map(repr, leaves))} may hold "
            f"{data_ids:,} ids; raise rows, or set it to 0 to use the data's"
        )
    return table if table.rows else dataclasses.replace(table, rows=data_ids)
