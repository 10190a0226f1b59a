"""Tables of one width stacked into one array: where each row lies in it, and what it holds at first."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..core import Batch
from ..core.counter_hash import bits_of_places, centred, mix
from .table_config import BLOCKS, FeatureConfig, Growth, TableConfig


@dataclasses.dataclass(frozen=True)
class TablePart:
    """Rows of a table that lie alike: all of them, or those that are hot, or the others.

    Attributes:
        first: The id of the first one.
        rows: How many there are.
    """

    table: TableConfig
    first: int
    rows: int

    @property
    def is_whole(self) -> bool:
        return self.rows == self.table.rows


@dataclasses.dataclass(frozen=True)
class StackPlan:
    """Tables of one width and placement, or parts of them, their rows one after the other, mixed.

    Attributes:
        offsets: Of each part, its first row before mixing.
        rows: Of all of them, filled up to a multiple of `blocks`.
        blocks: Parts between which adjacent rows are dealt out; 1 where they are not mixed.
    """

    parts: tuple[TablePart, ...]
    placement: str
    offsets: tuple[int, ...]
    rows: int
    blocks: int

    @property
    def width(self) -> int:
        return self.parts[0].table.width

    @property
    def growth(self) -> Growth | None:
        """Of its table, which is then alone in it."""
        return self.parts[0].table.growth

    @property
    def features(self) -> tuple[tuple[FeatureConfig, TablePart, int], ...]:
        """Each feature with what it reads of its table, and the first row of that."""
        return tuple((f, part, offset) for part, offset in zip(self.parts, self.offsets) for f in part.table.features)

    @property
    def ids_per_example(self) -> int:
        return sum(feature.capacity for feature, _, _ in self.features)

    def positions(self, batch: Batch) -> Int[Array, "batch ids"]:
        """Where the rows of all features lie in the stack, side by side; -1 where there is none."""
        return jnp.concatenate(
            [self.position(batch[f.leaf], part, offset) for f, part, offset in self.features], axis=1
        )

    def position(self, ids: Int[Array, "batch ids"], part: TablePart, offset: int) -> Int[Array, "batch ids"]:
        elsewhere = ids < 0
        if not part.is_whole:
            elsewhere = (ids < part.first) | (ids >= part.first + part.rows)
        return jnp.where(elsewhere, -1, mixed(ids + (offset - part.first), self.rows, self.blocks))


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


def stacked_tables(parts: tuple[TablePart, ...], placement: str) -> StackPlan:
    """Parts of tables of one width and placement, one after the other."""
    starts = np.cumsum([0, *(part.rows for part in parts)]).tolist()
    total = starts[-1]
    growth = parts[0].table.growth
    if growth is not None:
        # Whole blocks on each device.
        each = growth.ways * min(BLOCKS, 2 ** max(0, int(math.log2(max(total // growth.ways // 16, 1)))))
        return StackPlan(parts, placement, tuple(starts[:-1]), -(-total // each) * each, 1)
    # No more than a sixteenth is filled up.
    blocks = 1 if placement == "everywhere" else min(BLOCKS, 2 ** max(0, int(math.log2(max(total // 16, 1)))))
    rows = -(-total // blocks) * blocks
    return StackPlan(parts, placement, tuple(starts[:-1]), rows, blocks)


def drawn(key: jax.Array, plan: StackPlan) -> Float[Array, "row row_width"]:
    """The first values of a stack, each a hash of its place: the same on every mesh; zeros in rows that fill up or are free."""
    if plan.growth is not None:
        return jnp.zeros((plan.rows, plan.width), jnp.float32)
    place = jnp.arange(plan.rows, dtype=jnp.int32)
    row = unmixed(place, plan.rows, plan.blocks)
    sizes = jnp.asarray([part.table.rows for part in plan.parts], jnp.float32)
    table = jnp.searchsorted(jnp.asarray(plan.offsets, jnp.int32), row, side="right") - 1
    real = row < plan.offsets[-1] + plan.parts[-1].rows
    scale = jnp.where(real, jax.lax.rsqrt(sizes)[table], 0.0)
    column = jnp.arange(plan.width, dtype=jnp.int32)
    bits = bits_of_places("table", jax.random.bits(key, (), jnp.uint32), [place[:, None], column[None, :]])
    return centred(bits) * scale[:, None]
