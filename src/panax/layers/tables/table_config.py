"""Settings of single embedding tables: their features, placement, and growth."""

import dataclasses
from typing import Literal

from ...core.errors import RecipeError
from ...core.validation import Validated
from .bags import Pooling

Placement = Literal["auto", "rows", "columns", "everywhere"]

MAX_ROWS = 2**31 - 2**19
"""Maximum number of rows of a stack, with padding: row indices are int32."""

MAX_WAYS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureConfig(Validated):
    """A column of the data with ids of a table's rows.

    Attributes:
        leaf: Name of the batch leaf: int32 (batch, capacity), each row a bag of ids, padded with -1.
        capacity: Maximum number of ids in a bag.
        pooling: Reduction of a bag's rows.
        weights_leaf: Name of the batch leaf with a factor per id: float32 (batch, capacity); empty for none.
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
                f"remove it, or use the sum or mean"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growth(Validated):
    """Dynamic assignment of rows to new keys in the data, reusing the rows of keys that are no longer used.

    A feature's leaf then holds keys, uint32 (batch, capacity, 2), as made by `Bag(ids=HashedIds())`. A key's
    hash selects a block of rows. A new key gets the least recently used row of its block; if all are in use,
    it shares one with its owner, as with hashed ids. In evaluation, a key without a row is an empty bag.

    Attributes:
        ways: Rows per block, a power of two. More ways fill a table better, but take longer to search.
        idle_steps: A key may lose its row after more than this many steps without use.
    """

    ways: int = 16
    idle_steps: int = 0

    def __post_init__(self) -> None:
        if self.ways < 1 or self.ways & (self.ways - 1) or self.ways > MAX_WAYS:
            raise RecipeError(f"ways={self.ways}; expected a power of two up to {MAX_WAYS:,}, the rows of a block")
        if self.idle_steps < 0:
            raise RecipeError(f"idle_steps={self.idle_steps}; expected 0 or more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConfig(Validated):
    """Settings of a table and its features.

    Attributes:
        rows: Number of rows, with ids from 0 to `rows` - 1; 0 takes the number from the data.
        width: Elements per row.
        features: One or more features, which share the table.
        placement: rows: sharded over the whole mesh. columns: columns sharded over the tensor axis, rows over
            the others. everywhere: replicated. auto: everywhere up to `TablesConfig.small_bytes`, otherwise
            rows.
        hot_rows: Number of first rows to replicate on every device, whatever the placement of the others. If
            ids are ordered by frequency, as in a `CountVocabulary`, these are the most frequent ones, which
            then need no communication.
        growth: Assignment of rows to keys, if the features hold keys; None if they hold ids.
    """

    name: str
    rows: int
    width: int
    features: tuple[FeatureConfig, ...]
    placement: Placement = "auto"
    hot_rows: int = 0
    growth: Growth | None = None

    def __post_init__(self) -> None:
        if not self.features:
            raise RecipeError(f"no feature uses the table {self.name!r}; add one to its features, or remove the table")
        if self.growth is not None:
            self._check_growth(self.growth)
        if self.hot_rows < 0 or (0 < self.rows <= self.hot_rows):
            raise RecipeError(
                f"the table {self.name!r} has hot_rows={self.hot_rows:,} of rows={self.rows:,}; expected fewer than all, or "
                f'placement="everywhere"'
            )
        if self.hot_rows and (self.placement == "everywhere" or self.growth is not None):
            why = (
                'is replicated on every device (placement="everywhere")'
                if self.growth is None
                else "assigns rows to ids"
            )
            raise RecipeError(f"the table {self.name!r} has hot_rows={self.hot_rows:,}, and {why}; remove one of them")
        if self.rows < 0 or self.width < 1:
            raise RecipeError(f"the table {self.name!r} has rows={self.rows}, width={self.width}; expected 1 or more")
        if self.rows > MAX_ROWS:
            raise RecipeError(
                f"the table {self.name!r} has rows={self.rows:,}; ids are int32, so at most {MAX_ROWS:,}: hash the ids to fewer "
                f"rows, or split the feature into two tables. All tables together may have any number"
            )

    def _check_growth(self, growth: Growth) -> None:
        if self.rows < growth.ways:
            raise RecipeError(
                f"the table {self.name!r} grows, and has rows={self.rows}; expected the most rows that it may have, at least one "
                f"block of ways={growth.ways}"
            )
        if self.placement == "columns":
            raise RecipeError(
                f'the table {self.name!r} grows, and has placement="columns"; a row is assigned by the device that holds all of '
                f'it: use "rows" or "everywhere"'
            )

    @property
    def bytes(self) -> int:
        return 4 * self.rows * self.width
