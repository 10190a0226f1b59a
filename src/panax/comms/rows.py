"""An array as rows, a box of numbers in each, by the replica that owns them.

A box belongs to one replica by its place in the whole array: its index along one dimension, modulo the number of replicas. So a
box has the same owner on every mesh, and with other numbers of replicas nothing but the owners changes. The dimension is one of
which meshes leave many boxes on each device, so that each replica owns as many; where they are fewer, zeros fill up.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from ..core.boxes import quant_blocks
from ..core.counter_hash import bits_of_places
from ..core.layout import Layout, MeshAxes
from ..core.logical import traits_of
from ..core.protocols import Axes

MANY = 32
"""Boxes along a dimension that most meshes divide by the number of replicas."""


@dataclasses.dataclass(frozen=True)
class RowView:
    """How a device's shard of an array becomes rows: (owner, row, number).

    Attributes:
        shape: The shard's.
        places: For each dimension, the mesh axes that it is split over.
        box: The sides of a box.
        along: The dimension whose boxes are dealt out to owners, one after the other.
        owners: How many replicas share the rows.
    """

    name: str
    shape: tuple[int, ...]
    places: tuple[MeshAxes, ...]
    box: tuple[int, ...]
    along: int
    owners: int

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], axes: Axes, layout: Layout, owners: int) -> "RowView | None":
        """The rows of a shard; None where the array is too small, or nothing of its shape divides.

        Args:
            shape: The shard's.
            axes: The array's logical axes.
        """
        boxes = quant_blocks(shape, axes, layout)
        if boxes is None:
            return None
        along = dealt_along(boxes.whole, boxes.box, axes)
        return cls(name, shape, layout.storage(axes), boxes.sides, along, owners)

    @property
    def numbers(self) -> int:
        """In a row."""
        return math.prod(self.box)

    @property
    def count(self) -> int:
        """Of rows that each replica owns, those that fill up included."""
        return self._turns * math.prod(self._grid) // self._grid[self.along]

    @functools.cached_property
    def _grid(self) -> tuple[int, ...]:
        return tuple(size // side for size, side in zip(self.shape, self.box))

    @property
    def _turns(self) -> int:
        """How often all owners have had their turn along the dimension."""
        return -(-self._grid[self.along] // self.owners)

    @property
    def _split(self) -> list[int]:
        """The shape of a shard that is filled up: for each dimension boxes and their side; of `along`, turns, owners and side."""
        sizes = []
        for dim, (boxes, side) in enumerate(zip(self._grid, self.box)):
            sizes += [self._turns, self.owners, side] if dim == self.along else [boxes, side]
        return sizes

    @property
    def _order(self) -> list[int]:
        """Of the dimensions of `_split`: owners, then boxes, then sides."""
        at, grid, sides, owners = 0, [], [], 0
        for dim in range(len(self.shape)):
            grid.append(at)
            if dim == self.along:
                at += 1
                owners = at
            sides.append(at + 1)
            at += 2
        return [owners, *grid, *sides]

    def first(self) -> jax.Array | int:
        """The owner of this device's first box."""
        axes, boxes = self.places[self.along], self._grid[self.along]
        return jax.lax.axis_index(axes) * boxes % self.owners if axes and boxes % self.owners else 0

    def cut(self, x: Array) -> jax.Array:
        """A shard as rows."""
        lacking = self._turns * self.owners * self.box[self.along] - self.shape[self.along]
        if lacking:
            x = jnp.pad(x, [(0, lacking if dim == self.along else 0) for dim in range(x.ndim)])
        rows = x.reshape(self._split).transpose(self._order).reshape(self.owners, self.count, self.numbers)
        return _rolled(rows, self.first())

    def joined(self, rows: Array) -> jax.Array:
        """What was cut."""
        sizes, order = self._split, self._order
        back = [order.index(dim) for dim in range(len(order))]
        x = _rolled(rows, -self.first()).reshape([sizes[dim] for dim in order]).transpose(back)
        x = x.reshape([self._filled(dim) for dim in range(len(self.shape))])
        return x[tuple(map(slice, self.shape))] if x.shape != self.shape else x

    def _filled(self, dim: int) -> int:
        return self._turns * self.owners * self.box[dim] if dim == self.along else self.shape[dim]

    def bits(self, what: str, count: jax.Array, device: jax.Array | None = None) -> UInt32[Array, "owner row number"]:
        """Random bits for each number, by its place in the whole array, as `cut` gives rows.

        Args:
            device: Another number, other bits; None for the same ones on every replica.
        """
        places = []
        for dim, (size, axes) in enumerate(zip(self.shape, self.places)):
            index = jnp.arange(size, dtype=jnp.uint32)
            if axes:
                index = index + jax.lax.axis_index(axes).astype(jnp.uint32) * jnp.uint32(size)
            places.append(index.reshape(*(-1 if other == dim else 1 for other in range(len(self.shape)))))
        own = [] if device is None else [device]
        return self.cut(jnp.broadcast_to(bits_of_places(f"{self.name} {what}", count, [*own, *places]), self.shape))


def dealt_along(shape: tuple[int, ...], box: tuple[int, ...], axes: Axes) -> int:
    """The dimension whose boxes are dealt out: the one with the most boxes among those that at most one mesh axis splits at rest,
    where these are many; else the one with the most.

    Args:
        shape: Of the whole array.

    >>> dealt_along((12, 4096, 14336), (1, 8, 32), ("layer", "embed", "ffn")), dealt_along((64, 8), (1, 8), ("embed", "heads"))
    (2, 0)
    """
    boxes = [size // side for size, side in zip(shape, box)]
    calm = [dim for dim, axis in enumerate(axes) if len(traits_of(axis).storage or ()) <= 1 and boxes[dim] >= MANY]
    return max(calm or range(len(boxes)), key=lambda dim: boxes[dim])


def _rolled(x: Array, by: jax.Array | int) -> jax.Array:
    return x if isinstance(by, int) and by == 0 else jnp.roll(x, by, axis=0)
