"""Tables of a recommender: which features read which, how rows of equal width are stacked, and where the stacks lie."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..core import Batch, Module, parameter
from ..core.counter_hash import bits_of_places, mix
from ..core.errors import RecipeError
from ..core.growing import Growing
from ..core.module import name_key
from ..core.protocols import Axes
from ..core.validated import Validated
from ..parallel.row_places import Lies
from ..parallel.vocabulary import Blocks, Vocabulary
from .bags import Pooling, embedding_rows, pooled

Placement = Literal["auto", "rows", "columns", "everywhere"]

MOST_ROWS = 2**31 - 2**16
"""Of one stack: its rows, filled up, are numbered by int32."""

BLOCKS = 4096
"""Parts of a stack between which adjacent ids are dealt out; any number of devices that divides it holds whole parts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureConfig(Validated):
    """A column of the data that names rows of a table.

    Attributes:
        leaf: Of the batch: int32 (batch, capacity), each row a bag of ids, filled up with -1.
        capacity: The most ids in a bag.
        pooling: What a bag's rows are reduced by.
        weights_leaf: Of the batch: float32 (batch, capacity), what each row is multiplied with; empty where there is none.
    """

    leaf: str
    capacity: int = 1
    pooling: Pooling = "sum"
    weights_leaf: str = ""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise RecipeError(f"the feature {self.leaf!r} has capacity={self.capacity}; expected 1 or more")
        if self.pooling == "max" and self.weights_leaf:
            raise RecipeError(
                f'the feature {self.leaf!r} has pooling="max" and weights_leaf={self.weights_leaf!r}, which has no effect there; '
                f"leave it out, or take the sum or mean"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth(Validated):
    """Rows are given out to the keys that batches bring, and taken from those that are not asked for any more.

    A feature's leaf then holds keys, uint32 (batch, capacity, 2), as `Bag(ids=Keys())` makes them. A key's hash names a block of
    rows. A new key gets the row of its block that was asked for longest ago; where all are in use it reads one of them together
    with its owner, as with hashed ids. A key without a row is an empty bag in evaluations.

    Attributes:
        ways: Rows of a block, a power of two. More of them fill a table better, and take longer to search.
        idle_steps: A key may lose its row once it was not asked for in more steps than these.
    """

    ways: int = 16
    idle_steps: int = 0

    def __post_init__(self) -> None:
        if self.ways < 1 or self.ways & (self.ways - 1) or self.ways > BLOCKS:
            raise RecipeError(f"ways={self.ways}; expected a power of two up to {BLOCKS:,}, the rows of a block")
        if self.idle_steps < 0:
            raise RecipeError(f"idle_steps={self.idle_steps}; expected 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConfig(Validated):
    """A table and what reads it.

    Attributes:
        rows: Ids from 0 to `rows` - 1; 0 takes the data's number.
        width: Numbers in a row.
        features: One or more; several share the table.
        placement: rows: split over the whole mesh. columns: its columns over the tensor axis, its rows over the others.
            everywhere: a copy on each device. auto: everywhere up to `TablesConfig.small_bytes`, else rows.
        growth: Its features hold keys, which rows are given out to; None: they hold ids.
    """

    name: str
    rows: int
    width: int
    features: tuple[FeatureConfig, ...]
    placement: Placement = "auto"
    growth: Growth | None = None

    def __post_init__(self) -> None:
        if not self.features:
            raise RecipeError(
                f"no feature uses the table {self.name!r}; add one to its features, or leave the table out"
            )
        if self.growth is not None:
            self._check_growth(self.growth)
        if self.rows < 0 or self.width < 1:
            raise RecipeError(f"the table {self.name!r} has rows={self.rows}, width={self.width}; expected 1 or more")
        if self.rows > MOST_ROWS:
            raise RecipeError(
                f"the table {self.name!r} has rows={self.rows:,}; ids are int32, so at most {MOST_ROWS:,}: hash the ids to fewer "
                f"rows, or split the feature into two tables. All tables together may have any number"
            )

    def _check_growth(self, growth: Growth) -> None:
        if self.rows < growth.ways:
            raise RecipeError(
                f"the table {self.name!r} grows, and has rows={self.rows}; expected as many as it may come to have, at least one "
                f"block of ways={growth.ways}"
            )
        if self.placement == "columns":
            raise RecipeError(
                f'the table {self.name!r} grows, and has placement="columns"; a row is given out by the device that holds all of '
                f'it: take "rows" or "everywhere"'
            )

    @property
    def bytes(self) -> int:
        return 4 * self.rows * self.width


class RowTable(Module):
    """Stacked tables, rows over the whole mesh."""

    table: Float[Array, "row row_width"] = parameter(lambda *_: jnp.zeros(()))


class ColumnTable(Module):
    """Stacked tables, columns over the tensor axis and rows over the others."""

    table: Float[Array, "row_of_columns row_columns"] = parameter(lambda *_: jnp.zeros(()))


class SmallTable(Module):
    """Stacked tables of which each device holds all."""

    table: Float[Array, "row_everywhere row_width"] = parameter(lambda *_: jnp.zeros(()))


_KINDS: Mapping[str, type[RowTable] | type[ColumnTable] | type[SmallTable]] = MappingProxyType(
    {"rows": RowTable, "columns": ColumnTable, "everywhere": SmallTable}
)


@dataclasses.dataclass(frozen=True)
class StackPlan:
    """Tables of one width and placement, their rows one after the other, mixed.

    Attributes:
        offsets: Of each table, its first row before mixing.
        rows: Of all of them, filled up to a multiple of `blocks`.
        blocks: Parts between which adjacent rows are dealt out; 1 where they are not mixed.
    """

    tables: tuple[TableConfig, ...]
    placement: str
    offsets: tuple[int, ...]
    rows: int
    blocks: int

    @property
    def width(self) -> int:
        return self.tables[0].width

    @property
    def features(self) -> tuple[tuple[FeatureConfig, TableConfig, int], ...]:
        """Each feature with its table and that table's first row."""
        return tuple((f, table, offset) for table, offset in zip(self.tables, self.offsets) for f in table.features)

    @property
    def ids_per_example(self) -> int:
        return sum(feature.capacity for feature, _, _ in self.features)

    def positions(self, batch: Batch) -> Int[Array, "batch ids"]:
        """Where the rows of all features lie in the stack, side by side; -1 where there is none."""
        return jnp.concatenate([self.position(batch[f.leaf], offset) for f, _, offset in self.features], axis=1)

    def position(self, ids: Int[Array, "batch ids"], offset: int) -> Int[Array, "batch ids"]:
        return jnp.where(ids < 0, -1, mixed(ids + offset, self.rows, self.blocks))


def mixed(row: Int[Array, "*rows"], rows: int, blocks: int) -> Int[Array, "*rows"]:
    """A row's place: adjacent rows are dealt out to `blocks` equal parts, far apart, in another order for each round of dealing.

    A bijection of `range(rows)` that depends on no mesh. Frequent ids, which vocabularies number first, so lie on different
    devices, and those with a stride do too.

    Args:
        blocks: A power of two that divides `rows`.

    >>> sorted(mixed(jnp.arange(8), 8, 4).tolist()) == list(range(8))
    True
    """
    if blocks == 1:
        return row
    high, low = row // blocks, row % blocks
    part = (low * _apart(blocks)) % blocks ^ _turn(high, blocks)
    return (part * (rows // blocks) + high).astype(row.dtype)


def unmixed(place: Int[Array, "*rows"], rows: int, blocks: int) -> Int[Array, "*rows"]:
    """The row at a place: the inverse of `mixed`."""
    if blocks == 1:
        return place
    each = rows // blocks
    high, part = place % each, place // each
    low = (part ^ _turn(high, blocks)) * pow(_apart(blocks), -1, blocks) % blocks
    return (high * blocks + low).astype(place.dtype)


def _apart(blocks: int) -> int:
    """How far adjacent rows are dealt apart: an odd number next to the golden section, so that few of them are spread too."""
    return int(0.618 * blocks) | 1


def _turn(high: jax.Array, blocks: int) -> jax.Array:
    return (mix(high.astype(jnp.uint32)) % jnp.uint32(blocks)).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TablesConfig(Validated):
    """All tables of a model.

    Attributes:
        small_bytes: Up to so many bytes every device holds a copy, where a table's placement is auto.
        in_params: Where the model holds its `Tables`, as parameters are named.
    """

    tables: tuple[TableConfig, ...]
    small_bytes: int = 2**18
    in_params: str = "tables"

    def __post_init__(self) -> None:
        named: dict[str, TableConfig] = {}
        read: dict[str, str] = {}
        if not self.tables:
            raise RecipeError("tables is empty; expected one TableConfig or more")
        for table in self.tables:
            other = named.setdefault(table.name, table)
            if other is not table:
                widths = f" of width {other.width} and of width {table.width}" if other.width != table.width else ""
                raise RecipeError(
                    f"two tables are named {table.name!r}{widths}; features that share a table are listed in one, which has one "
                    f"width: for two widths take two names"
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
        """Tables of one width and placement in one parameter, as many as int32 can number."""
        groups: dict[tuple[int, str, int], list[TableConfig]] = {}
        full: dict[tuple[int, str], int] = {}
        for table in self.tables:
            if table.growth is not None:
                # Whose rows are found by their keys' hashes, and so lie in blocks of their own.
                groups[table.width, self.placement_of(table), -1 - len(groups)] = [table]
                continue
            kind = table.width, self.placement_of(table)
            number = full.get(kind, 0)
            if sum(t.rows for t in groups.get((*kind, number), ())) + table.rows > MOST_ROWS:
                full[kind] = number = number + 1
            groups.setdefault((*kind, number), []).append(table)
        return tuple(_stack(tuple(tables), placement) for (_, placement, _), tables in groups.items())

    def placement_of(self, table: TableConfig) -> str:
        if table.placement != "auto":
            return table.placement
        return "everywhere" if table.bytes <= self.small_bytes else "rows"

    def adapted(self, num_ids: Mapping[str, int]) -> "TablesConfig":
        """These tables, those with rows=0 of the data's number.

        Args:
            num_ids: How many ids the data says that each leaf may hold.

        Raises:
            RecipeError: A table has fewer rows than the data has ids, or the data does not say how many.
        """
        return dataclasses.replace(self, tables=tuple(_adapted(table, num_ids) for table in self.tables))

    @property
    def leaf_ranges(self) -> dict[str, range]:
        """What each feature's leaf may hold, as `Task.leaf_ranges` says it."""
        fixed = (table for table in self.tables if table.growth is None)
        return {feature.leaf: range(-1, table.rows) for table in fixed for feature in table.features}

    @property
    def batch_axes(self) -> dict[str, Axes]:
        """The logical axes of each feature's leaves, as `Task.batch_axes` says them."""
        features = [feature for table in self.tables for feature in table.features]
        leaves = [leaf for f in features for leaf in (f.leaf, f.weights_leaf) if leaf]
        keys = [feature.leaf for table in self.tables if table.growth is not None for feature in table.features]
        return {**dict.fromkeys(leaves, ("batch", None)), **dict.fromkeys(keys, ("batch", None, None))}

    @property
    def growing(self) -> tuple[Growing, ...]:
        """The tables that grow, as `Task.growing` says them; a vocabulary has its table's name."""
        return tuple(
            Growing(
                f"{self.in_params}.stacks.{n}.table",
                table.name,
                tuple(feature.leaf for feature in table.features),
                table.growth.ways,
                table.growth.idle_steps,
                plan.rows**-0.5,
            )
            for n, plan in enumerate(self.stacks)
            for table in plan.tables
            if table.growth is not None
        )

    def first_vocabularies(self) -> dict[str, dict[str, Array]]:
        """Those of the tables that grow, in which no row is given out: a part of the model state, a mapping."""
        return {
            plan.tables[0].name: {
                "keys": jnp.zeros((plan.rows, 2), jnp.uint32),
                "asked": jnp.full(plan.rows, -1, jnp.int32),
            }
            for plan in self.stacks
            if plan.tables[0].growth is not None
        }

    def vocabulary_axes(self) -> dict[str, dict[str, Axes]]:
        """The logical axes of these."""
        return {
            plan.tables[0].name: {"keys": (axis, None), "asked": (axis,)}
            for plan in self.stacks
            if plan.tables[0].growth is not None
            for axis in ("row_everywhere" if plan.placement == "everywhere" else "row",)
        }

    def with_rows(self, vocabularies: Mapping[str, Mapping[str, Array]], batch: Batch) -> dict[str, Any]:
        """A batch with row numbers in the places of keys, -1 for a key without a row, on one device: as evaluations see it.

        Args:
            vocabularies: Those that `first_vocabularies` names, such as the whole model state.

        Raises:
            RecipeError: There is no vocabulary for a table that grows.
        """
        found = dict(batch)
        for each in self.growing:
            if each.vocabulary not in vocabularies:
                raise RecipeError(
                    f"the table {each.vocabulary!r} grows, and its vocabulary is not here; give the model state of the training"
                )
            vocabulary = Vocabulary(**{name: jnp.asarray(leaf) for name, leaf in vocabularies[each.vocabulary].items()})
            blocks = Blocks.of(Lies((), (), (), ()), vocabulary.keys.shape, each.ways, each.idle_steps)
            for leaf in each.leaves:
                keys = jnp.asarray(batch[leaf])
                found[leaf] = blocks.found(vocabulary, keys.reshape(-1, 2)).reshape(keys.shape[:-1])
        return found

    def row_ids(self, batch: Batch) -> dict[str, Int[Array, "batch ids"]]:
        """What a batch asks for, as `Task.row_ids` says it.

        Raises:
            RecipeError: The batch lacks a feature, or its bags have another capacity.
        """
        self.check(batch)
        return {f"{self.in_params}.stacks.{n}.table": plan.positions(batch) for n, plan in enumerate(self.stacks)}

    def check(self, batch: Batch) -> None:
        """
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

    def create(self, key: jax.Array) -> "Tables":
        """Draw all tables: uniform within the root of 1 / rows of each."""
        stacks = tuple(
            _KINDS[plan.placement](table=drawn(name_key(key, f"stack {n}"), plan)) for n, plan in enumerate(self.stacks)
        )
        return Tables(stacks=stacks, config=self)


class Tables(Module):
    """All tables of a model, as parameters.

    tables = TablesConfig(tables=(TableConfig(name="item", rows=1000, width=8, features=(FeatureConfig(leaf="item"),)),))
    model = tables.create(key)
    vectors = model(batch)["item"]
    """

    stacks: tuple[Any, ...]
    config: TablesConfig = dataclasses.field(metadata={"static": True})

    def __call__(self, batch: Batch) -> dict[str, Float[Array, "batch row_width"]]:
        """For each feature, by its leaf, a vector for each example; zeros for an empty bag."""
        self.config.check(batch)
        found: dict[str, jax.Array] = {}
        for plan, stack in zip(self.config.stacks, self.stacks):
            rows = embedding_rows(stack.table, plan.positions(batch))
            first = 0
            for feature, _, _ in plan.features:
                weights = batch[feature.weights_leaf] if feature.weights_leaf else None
                bag = rows[:, first : first + feature.capacity]
                found[feature.leaf] = pooled(bag, batch[feature.leaf], pooling=feature.pooling, weights=weights)
                first += feature.capacity
        return found

    def row_ids(self, batch: Batch) -> dict[str, Int[Array, "batch ids"]]:
        """As `TablesConfig.row_ids`."""
        return self.config.row_ids(batch)


def _adapted(table: TableConfig, num_ids: Mapping[str, int]) -> TableConfig:
    if table.growth is not None:
        return table
    leaves = [feature.leaf for feature in table.features]
    wanted = max((num_ids.get(leaf, 0) for leaf in leaves), default=0)
    if table.rows == 0 and not wanted:
        raise RecipeError(
            f"the table {table.name!r} has rows=0, which takes the data's number of ids, and the data does not say how many "
            f"{' and '.join(map(repr, leaves))} may hold; give a number"
        )
    if 0 < table.rows < wanted:
        raise RecipeError(
            f"the table {table.name!r} has rows={table.rows:,}, and the data's {' and '.join(map(repr, leaves))} may hold "
            f"{wanted:,} ids; raise rows, or set it to 0 to take the data's"
        )
    return table if table.rows else dataclasses.replace(table, rows=wanted)


def _stack(tables: tuple[TableConfig, ...], placement: str) -> StackPlan:
    starts = np.cumsum([0, *(table.rows for table in tables)]).tolist()
    total = starts[-1]
    growth = tables[0].growth
    if growth is not None:
        # Whole blocks on each device.
        parts = growth.ways * min(BLOCKS, 2 ** max(0, int(math.log2(max(total // growth.ways // 16, 1)))))
        return StackPlan(tables, placement, tuple(starts[:-1]), -(-total // parts) * parts, 1)
    # No more than a sixteenth is filled up.
    blocks = 1 if placement == "everywhere" else min(BLOCKS, 2 ** max(0, int(math.log2(max(total // 16, 1)))))
    rows = -(-total // blocks) * blocks
    return StackPlan(tables, placement, tuple(starts[:-1]), rows, blocks)


def drawn(key: jax.Array, plan: StackPlan) -> Float[Array, "row row_width"]:
    """The first values of a stack, each a hash of its place: the same on every mesh; zeros in rows that fill up or are free."""
    if plan.tables[0].growth is not None:
        return jnp.zeros((plan.rows, plan.width), jnp.float32)
    place = jnp.arange(plan.rows, dtype=jnp.int32)
    row = unmixed(place, plan.rows, plan.blocks)
    sizes = jnp.asarray([table.rows for table in plan.tables], jnp.float32)
    table = jnp.searchsorted(jnp.asarray(plan.offsets, jnp.int32), row, side="right") - 1
    real = row < plan.offsets[-1] + plan.tables[-1].rows
    scale = jnp.where(real, jax.lax.rsqrt(sizes)[table], 0.0)
    column = jnp.arange(plan.width, dtype=jnp.int32)
    bits = bits_of_places("table", jax.random.bits(key, (), jnp.uint32), [place[:, None], column[None, :]])
    signed = (bits >> 8).astype(jnp.int32) - 2**23
    return (signed.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23) * scale[:, None]
