"""An array as rows, a box of numbers in each, and which replica owns which row.

A box belongs to one replica by its place in the whole array: the sum of its indices along all dimensions, modulo the number of
replicas. So a box has the same owner on every mesh, a device's boxes are shared out evenly wherever one of their dimensions
divides, and with other numbers of replicas nothing but the owners changes.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from ..core.boxes import box_of
from ..core.counter_hash import bits_of_places
from ..core.layout import Layout, MeshAxes
from ..core.logical import is_copies
from ..core.protocols import Axes

LEAST, BOX, SMALLEST = 4096, 256, 16
"""Arrays of fewer numbers are not cut in boxes; numbers of a box at most, and at least."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """How a device's shard of an array becomes rows.

    Attributes:
        shape: The shard's.
        places: For each dimension, the mesh axes that it is split over.
        parts: How many devices these are.
        box: The sides of a box.
        owners: How many replicas share the rows.
    """

    name: str
    shape: tuple[int, ...]
    places: tuple[MeshAxes, ...]
    parts: tuple[int, ...]
    box: tuple[int, ...]
    owners: int

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], axes: Axes, layout: Layout, owners: int) -> "Rows | None":
        """The rows of a shard; None where the array is too small, or nothing of its shape divides.

        Args:
            shape: The shard's.
            axes: The array's logical axes.
        """
        places = layout.storage(axes)
        parts = tuple(math.prod(layout.sizes[axis] for axis in dim) for dim in places)
        box = boxes_in(tuple(size * n for size, n in zip(shape, parts)), axes)
        if box is None:
            return None
        # Split further than boxes leave room for, they are smaller: such a mesh rounds otherwise than others.
        sides = [math.gcd(side, size) for side, size in zip(box, shape)]
        return None if math.prod(sides) < SMALLEST else cls(name, shape, places, parts, tuple(sides), owners)

    @property
    def numbers(self) -> int:
        """In a row."""
        return math.prod(self.box)

    @property
    def count(self) -> int:
        """Of rows that each replica owns, those that fill up included."""
        return self._order.shape[1]

    @functools.cached_property
    def _grid(self) -> tuple[int, ...]:
        return tuple(size // side for size, side in zip(self.shape, self.box))

    @functools.cached_property
    def _residues(self) -> np.ndarray:
        """Of each row, the sum of its indices in the shard, modulo `owners`."""
        return (np.indices(self._grid).sum(0).reshape(-1) % self.owners).astype(np.int32)

    @functools.cached_property
    def _order(self) -> np.ndarray:
        """Of each residue the rows, filled up with a row that is not there."""
        found = [np.flatnonzero(self._residues == owner) for owner in range(self.owners)]
        most = max(map(len, found))
        return np.stack([np.pad(rows, (0, most - len(rows)), constant_values=len(self._residues)) for rows in found])

    @functools.cached_property
    def _slots(self) -> np.ndarray:
        """Of each row, its place among those of its residue."""
        slots = np.zeros(len(self._residues), np.int32)
        for rows in self._order:
            held = rows[rows < len(slots)]
            slots[held] = np.arange(len(held))
        return slots

    def first(self) -> jax.Array | int:
        """The owner of residue 0 on this device."""
        shift: jax.Array | int = 0
        for dim, axes in enumerate(self.places):
            if self._grid[dim] % self.owners and axes:
                shift = shift + jax.lax.axis_index(axes) * self._grid[dim]
        return shift if isinstance(shift, int) else shift % self.owners

    def cut(self, x: Array) -> jax.Array:
        """A shard as rows."""
        sides = [size for pair in zip(self._grid, self.box) for size in pair]
        order = (*range(0, 2 * x.ndim, 2), *range(1, 2 * x.ndim, 2))
        return x.reshape(sides).transpose(order).reshape(-1, self.numbers)

    def joined(self, rows: jax.Array) -> jax.Array:
        """What was cut."""
        n = len(self.shape)
        order = [dim for pair in zip(range(n), range(n, 2 * n)) for dim in pair]
        return rows.reshape(*self._grid, *self.box).transpose(order).reshape(self.shape)

    def by_owner(self, rows: jax.Array) -> jax.Array:
        """Rows, or what was made of each, as (owner, row, ...)."""
        return _rolled(jnp.take(rows, self._order, axis=0, mode="fill", fill_value=0), self.first())

    def in_order(self, owned: jax.Array) -> jax.Array:
        """What `by_owner` gave, as rows again."""
        owned = _rolled(owned, -self.first())
        return owned.reshape(-1, *owned.shape[2:])[self._residues * self.count + self._slots]

    def own(self, rows: jax.Array, owner: jax.Array) -> jax.Array:
        """The rows that a replica owns."""
        mine = jnp.asarray(self._order)[(owner - self.first()) % self.owners]
        return jnp.take(rows, mine, axis=0, mode="fill", fill_value=0)

    def with_own(self, rows: jax.Array, owned: jax.Array, owner: jax.Array) -> jax.Array:
        """Rows, with others for those that a replica owns."""
        mine = jnp.asarray(self._residues) == (owner - self.first()) % self.owners
        return jnp.where(mine[:, None], owned[self._slots], rows)

    def bits(self, what: str, count: jax.Array, device: jax.Array | None = None) -> UInt32[Array, "row number"]:
        """Random bits for each number, by its place in the whole array.

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


def boxes_in(shape: tuple[int, ...], axes: Axes) -> tuple[int, ...] | None:
    """The sides of an array's boxes; None for what is not cut.

    Args:
        shape: Of the whole array.

    >>> boxes_in((12, 4096, 14336), ("layer", "embed", "ffn")), boxes_in((64, 64), ("layer", "norm"))
    ((1, 8, 32), None)
    """
    own = [dim for dim, axis in enumerate(axes) if not is_copies(axis)]
    if math.prod(shape[dim] for dim in own) < LEAST:
        return None
    box = box_of(shape, axes, own, BOX)
    return None if math.prod(box) < SMALLEST else box


def _rolled(x: Array, by: jax.Array | int) -> jax.Array:
    return x if isinstance(by, int) and by == 0 else jnp.roll(x, by, axis=0)
