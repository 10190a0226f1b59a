"""Tables of one width stacked into one array: where each row lies in it, and what it holds at first."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..core import Batch
from ..core.counter_hash import bits_of_places, to_centered_uniform
from .mixed_rows import mix_rows, parts_for, pad_rows_to_parts, unmix_rows
from .table_config import FeatureConfig, Growth, TableConfig


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
        blocks: Equal parts between which adjacent rows are dealt out; 1 where they are not mixed.
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
        return jnp.where(elsewhere, -1, mix_rows(ids + (offset - part.first), self.rows, self.blocks))


SMALL_BLOCKS = 4096
"""Up to so many blocks of a growing table are filled up to a multiple of the power of two below, so that meshes of fewer devices
divide them; a larger table is filled up by a sixteenth at most."""


def stacked_tables(parts: tuple[TablePart, ...], placement: str) -> StackPlan:
    """Parts of tables of one width and placement, one after the other."""
    starts = np.cumsum([0, *(part.rows for part in parts)]).tolist()
    total = starts[-1]
    growth = parts[0].table.growth
    if growth is not None:
        # Whole blocks on each device, where keys are mixed by their hashes.
        blocks = -(-total // growth.ways)
        shares = parts_for(blocks) if blocks > SMALL_BLOCKS else 2 ** int(math.log2(blocks))
        return StackPlan(parts, placement, tuple(starts[:-1]), pad_rows_to_parts(blocks, shares) * growth.ways, 1)
    blocks = 1 if placement == "everywhere" else parts_for(total)
    return StackPlan(parts, placement, tuple(starts[:-1]), pad_rows_to_parts(total, blocks), blocks)


def drawn(key: jax.Array, plan: StackPlan) -> Float[Array, "row row_width"]:
    """The first values of a stack, each a hash of its place: the same on every mesh; zeros in rows that fill up or are free."""
    if plan.growth is not None:
        return jnp.zeros((plan.rows, plan.width), jnp.float32)
    place = jnp.arange(plan.rows, dtype=jnp.int32)
    row = unmix_rows(place, plan.rows, plan.blocks)
    sizes = jnp.asarray([part.table.rows for part in plan.parts], jnp.float32)
    table = jnp.searchsorted(jnp.asarray(plan.offsets, jnp.int32), row, side="right") - 1
    real = row < plan.offsets[-1] + plan.parts[-1].rows
    scale = jnp.where(real, jax.lax.rsqrt(sizes)[table], 0.0)
    column = jnp.arange(plan.width, dtype=jnp.int32)
    bits = bits_of_places("table", jax.random.bits(key, (), jnp.uint32), [place[:, None], column[None, :]])
    return to_centered_uniform(bits) * scale[:, None]
