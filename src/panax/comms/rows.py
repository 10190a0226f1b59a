"""View of an array as rows of one quantization block each, grouped by the replica that owns them.

The owner of a block follows from its index in the global array along one dimension, modulo the number of
replicas. A block thus has the same owner on every mesh, and another number of replicas changes only the
owners. The dimension is one along which common meshes leave many blocks on each device, so that all replicas
own the same number; otherwise zeros are padded.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from ..core.layout.layout import Layout, MeshAxes
from ..core.layout.quant_blocks import quant_blocks
from ..core.params.counter_rng import element_bits
from ..core.params.logical import lookup_axis
from ..core.protocols import Axes

MANY = 32
"""Number of blocks along a dimension that most meshes divide by the number of replicas."""


@dataclasses.dataclass(frozen=True)
class RowView:
    """How a device's shard of an array is cut into rows: [owner, row, element].

    Attributes:
        name: Name of the array, a seed of random bits.
        shape: Shape of the shard.
        dim_axes: For each dimension, the mesh axes that shard it.
        block_shape: Shape of a block.
        dealt_dim: Dimension with blocks that are assigned to owners in turn.
        owners: Number of replicas among which rows are divided.
    """

    name: str
    shape: tuple[int, ...]
    dim_axes: tuple[MeshAxes, ...]
    block_shape: tuple[int, ...]
    dealt_dim: int
    owners: int

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], axes: Axes, layout: Layout, owners: int) -> "RowView | None":
        """Return the row view of a shard; None if the array is too small or its dimensions have no suitable divisors.

        Args:
            shape: Shape of the shard.
            axes: The array's logical axes.
            owners: Number of replicas.
        """
        blocks = quant_blocks(shape, axes, layout)
        if blocks is None:
            return None
        dealt_dim = choose_dealt_dim(blocks.global_shape, blocks.block_shape, axes)
        return cls(name, shape, layout.storage(axes), blocks.local_block_shape, dealt_dim, owners)

    @property
    def row_length(self) -> int:
        """Number of elements per row."""
        return math.prod(self.block_shape)

    @property
    def rows_per_owner(self) -> int:
        """Number of rows that each replica owns, including padding."""
        return self._turns * math.prod(self._grid) // self._grid[self.dealt_dim]

    @functools.cached_property
    def _grid(self) -> tuple[int, ...]:
        return tuple(size // side for size, side in zip(self.shape, self.block_shape))

    @property
    def _turns(self) -> int:
        """Number of blocks per owner along `dealt_dim`, rounded up."""
        return -(-self._grid[self.dealt_dim] // self.owners)

    @property
    def _split(self) -> list[int]:
        """Shape of a padded shard, split into blocks: (blocks, side) per dimension, (turns, owners, side) for
        `dealt_dim`.
        """
        sizes = []
        for dim, (num_blocks, side) in enumerate(zip(self._grid, self.block_shape)):
            sizes += [self._turns, self.owners, side] if dim == self.dealt_dim else [num_blocks, side]
        return sizes

    @property
    def _order(self) -> list[int]:
        """Permutation of the dimensions of `_split`: owners, then blocks, then sides."""
        at, grid, sides, owners = 0, [], [], 0
        for dim in range(len(self.shape)):
            grid.append(at)
            if dim == self.dealt_dim:
                at += 1
                owners = at
            sides.append(at + 1)
            at += 2
        return [owners, *grid, *sides]

    def first_owner(self) -> jax.Array | int:
        """Return the owner of this device's first block."""
        axes, num_blocks = self.dim_axes[self.dealt_dim], self._grid[self.dealt_dim]
        return jax.lax.axis_index(axes) * num_blocks % self.owners if axes and num_blocks % self.owners else 0

    def to_rows(self, x: Array) -> jax.Array:
        """Cut a shard into rows."""
        padding = self._turns * self.owners * self.block_shape[self.dealt_dim] - self.shape[self.dealt_dim]
        if padding:
            x = jnp.pad(x, [(0, padding if dim == self.dealt_dim else 0) for dim in range(x.ndim)])
        rows = x.reshape(self._split).transpose(self._order).reshape(self.owners, self.rows_per_owner, self.row_length)
        return _rolled(rows, self.first_owner())

    def from_rows(self, rows: Array) -> jax.Array:
        """Join rows into a shard, the inverse of `to_rows`."""
        sizes, order = self._split, self._order
        back = [order.index(dim) for dim in range(len(order))]
        x = _rolled(rows, -self.first_owner()).reshape([sizes[dim] for dim in order]).transpose(back)
        x = x.reshape([self._padded_size(dim) for dim in range(len(self.shape))])
        return x[tuple(map(slice, self.shape))] if x.shape != self.shape else x

    def _padded_size(self, dim: int) -> int:
        return self._turns * self.owners * self.block_shape[dim] if dim == self.dealt_dim else self.shape[dim]

    def random_bits(
        self, purpose: str, count: jax.Array, device: jax.Array | None = None
    ) -> UInt32[Array, "owner row number"]:
        """Return random bits for each element, by its index in the global array, in the layout of `to_rows`.

        Args:
            purpose: A name for these bits, part of the seed.
            count: Step number, part of the seed.
            device: Part of the seed; None for the same bits on every replica.
        """
        indices = []
        for dim, (size, axes) in enumerate(zip(self.shape, self.dim_axes)):
            index = jnp.arange(size, dtype=jnp.uint32)
            if axes:
                index = index + jax.lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(size)
            indices.append(index.reshape(*(-1 if other == dim else 1 for other in range(len(self.shape)))))
        device_index = [] if device is None else [device]
        return self.to_rows(
            jnp.broadcast_to(element_bits(f"{self.name} {purpose}", count, [*device_index, *indices]), self.shape)
        )


def choose_dealt_dim(shape: tuple[int, ...], block_shape: tuple[int, ...], axes: Axes) -> int:
    """Return the dimension with blocks that are assigned to owners in turn.

    This is the dimension with the most blocks among those with many blocks that at most one mesh axis shards in
    storage; without such dimensions, the one with the most blocks overall.

    Args:
        shape: Shape of the global array.
        block_shape: Shape of a block.

    >>> choose_dealt_dim((12, 4096, 14336), (1, 8, 32), ("layer", "embed", "ffn"))
    2
    >>> choose_dealt_dim((64, 8), (1, 8), ("embed", "heads"))
    0
    """
    num_blocks = [size // side for size, side in zip(shape, block_shape)]
    candidates = [
        dim for dim, axis in enumerate(axes) if len(lookup_axis(axis).storage or ()) <= 1 and num_blocks[dim] >= MANY
    ]
    return max(candidates or range(len(num_blocks)), key=lambda dim: num_blocks[dim])


def _rolled(x: Array, by: jax.Array | int) -> jax.Array:
    return x if isinstance(by, int) and by == 0 else jnp.roll(x, by, axis=0)
