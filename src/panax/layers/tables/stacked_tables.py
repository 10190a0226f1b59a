"""Tables of one width stacked into one array: the index of each row in the stack, and its initial value."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ...core import Batch
from ...core.params.counter_rng import element_bits, to_centered_uniform
from .mixed_rows import choose_num_parts, mix_rows, pad_rows_to_parts, unmix_rows
from .table_config import FeatureConfig, Growth, TableConfig


@dataclasses.dataclass(frozen=True)
class TablePart:
    """Rows of a table with one placement: all of them, the hot ones, or the others.

    Attributes:
        first: Id of the first row.
        rows: Number of rows.
    """

    table: TableConfig
    first: int
    rows: int

    @property
    def is_whole(self) -> bool:
        return self.rows == self.table.rows


@dataclasses.dataclass(frozen=True)
class StackPlan:
    """Tables of one width and placement, or parts of them, concatenated along rows and permuted.

    Attributes:
        offsets: For each part, the index of its first row before the permutation.
        rows: Total number of rows, padded to a multiple of `blocks`.
        blocks: Number of equal blocks over which adjacent rows are spread; 1 for no permutation.
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
        """Growth of its table, which is then the only one in the stack."""
        return self.parts[0].table.growth

    @property
    def features(self) -> tuple[tuple[FeatureConfig, TablePart, int], ...]:
        """Each feature with the part of its table that it reads, and that part's first row."""
        return tuple((f, part, offset) for part, offset in zip(self.parts, self.offsets) for f in part.table.features)

    def positions(self, batch: Batch) -> Int[Array, "batch ids"]:
        """Return the stack row of every id of all features, concatenated; -1 for ids that are not in this
        stack."""
        return jnp.concatenate(
            [self.position(batch[f.leaf], part, offset) for f, part, offset in self.features], axis=1
        )

    def position(self, ids: Int[Array, "batch ids"], part: TablePart, offset: int) -> Int[Array, "batch ids"]:
        elsewhere = ids < 0
        if not part.is_whole:
            elsewhere = (ids < part.first) | (ids >= part.first + part.rows)
        return jnp.where(elsewhere, -1, mix_rows(ids + (offset - part.first), self.rows, self.blocks))


SMALL_BLOCKS = 4096
"""Maximum number of blocks of a growing table that is padded to a multiple of the next lower power of two, so
that meshes of fewer devices divide it; the padding of a larger table is at most a sixteenth."""


def plan_stack(parts: tuple[TablePart, ...], placement: str) -> StackPlan:
    """Concatenate parts of tables of one width and placement."""
    starts = np.cumsum([0, *(part.rows for part in parts)]).tolist()
    total = starts[-1]
    growth = parts[0].table.growth
    if growth is not None:
        # Each device holds whole blocks; no permutation is needed, since key hashes spread the rows.
        blocks = -(-total // growth.ways)
        shares = choose_num_parts(blocks) if blocks > SMALL_BLOCKS else 2 ** int(math.log2(blocks))
        return StackPlan(parts, placement, tuple(starts[:-1]), pad_rows_to_parts(blocks, shares) * growth.ways, 1)
    blocks = 1 if placement == "everywhere" else choose_num_parts(total)
    return StackPlan(parts, placement, tuple(starts[:-1]), pad_rows_to_parts(total, blocks), blocks)


def init_stack(key: jax.Array, plan: StackPlan) -> Float[Array, "row row_width"]:
    """Initialize a stack, each element from a hash of its index, so that it is the same on every mesh;
    padding and free rows are zero."""
    if plan.growth is not None:
        return jnp.zeros((plan.rows, plan.width), jnp.float32)
    place = jnp.arange(plan.rows, dtype=jnp.int32)
    row = unmix_rows(place, plan.rows, plan.blocks)
    sizes = jnp.asarray([part.table.rows for part in plan.parts], jnp.float32)
    table = jnp.searchsorted(jnp.asarray(plan.offsets, jnp.int32), row, side="right") - 1
    real = row < plan.offsets[-1] + plan.parts[-1].rows
    scale = jnp.where(real, jax.lax.rsqrt(sizes)[table], 0.0)
    column = jnp.arange(plan.width, dtype=jnp.int32)
    bits = element_bits("table", jax.random.bits(key, (), jnp.uint32), [place[:, None], column[None, :]])
    return to_centered_uniform(bits) * scale[:, None]
