"""Rows sorted by group, with every group at the start of a tile: the layout of grouped matmuls."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Int

from panax.core.layout.target import Target


class Groups(eqx.Module):
    """Layout of each group's rows in a buffer.

    Rows are sorted by group. Every group begins at a multiple of `tile`, so that no tile contains rows of two
    groups; the gap after a group's last row contains zero rows. A group without rows takes no tile.

    Attributes:
        sizes: Number of rows of each group, without gaps.
        rows: Rows of the buffer, a multiple of `tile`; see `aligned_row_count` for the number that fits any
            distribution.
        tile: Number of rows of a tile.

    >>> groups = Groups(sizes=jnp.array([3, 0, 9]), rows=24, tile=4)
    >>> groups.starts.tolist(), groups.tile_group.tolist(), int(groups.used_tiles)
    ([0, 4, 4], [0, 2, 2, 2, 3, 3], 4)
    """

    sizes: Int[Array, " group"]
    rows: int = eqx.field(static=True)
    tile: int = eqx.field(static=True)

    def __check_init__(self):
        if self.tile < 1 or self.rows % self.tile:
            raise ValueError(f"rows={self.rows} must be a multiple of tile={self.tile}; use aligned_row_count(...)")

    @property
    def tiles(self) -> Int[Array, " group"]:
        """Return the number of tiles of each group."""
        return (self.sizes.astype(jnp.int32) + self.tile - 1) // self.tile

    @property
    def starts(self) -> Int[Array, " group"]:
        """Return the first row of each group; for an empty group, that of the next one."""
        return (jnp.cumsum(self.tiles) - self.tiles) * self.tile

    @property
    def tile_group(self) -> Int[Array, " tile"]:
        """Return the group of each tile; for the unused tiles at the end, the number of groups."""
        tile = jnp.arange(self.rows // self.tile, dtype=jnp.int32)
        return (tile[:, None] >= jnp.cumsum(self.tiles)[None, :]).sum(axis=1, dtype=jnp.int32)

    @property
    def used_tiles(self) -> Int[Array, ""]:
        """Return the number of tiles with rows of a group: all tiles before the unused ones."""
        return self.tiles.sum(dtype=jnp.int32)


def choose_tile(target: Target, *, rows: int, groups: int) -> int:
    """Choose the number of rows of a tile that suits the target's kernels and wastes little on gaps: a power
    of two.

    Args:
        target: Target that the program is compiled for.
        rows: Expected number of rows in all groups together.
    """
    tile, smallest, share = _TILES.get(target.platform, _TILES["gpu"])
    while tile > smallest and tile * groups * share > 2 * rows:
        tile //= 2
    return tile


def aligned_row_count(rows: int, groups: int, tile: int) -> int:
    """Return the number of rows of the smallest buffer that fits `rows` rows in any distribution over the
    groups.

    >>> aligned_row_count(10, 3, 4)
    16
    """
    occupied = min(rows, groups)
    return tile * (occupied + (rows - occupied) // tile)


# The largest and the smallest tile; and the inverse of the maximum share of a group's rows that its gap, half
# a tile on average, may be. A GPU's tile is a block of its kernel; a TPU's kernel reads a group's matrix once
# for each tile.
_TILES = {"cpu": (32, 16, 16), "gpu": (128, 64, 16), "tpu": (512, 128, 8)}
