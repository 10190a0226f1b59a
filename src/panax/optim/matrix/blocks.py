"""Matrices cut into blocks of equal shape."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class MatrixBlocks(NamedTuple):
    """Even partition of a matrix into blocks, zero-padded if the shape is not divisible.

    Attributes:
        shape: Shape of the matrix.
        counts: Number of blocks along rows and along columns.
        size: Shape of one block.
    """

    shape: tuple[int, int]
    counts: tuple[int, int]
    size: tuple[int, int]

    @classmethod
    def of(cls, shape: tuple[int, int], largest: int) -> "MatrixBlocks":
        """Choose the fewest blocks with no side larger than `largest`.

        >>> MatrixBlocks.of((300, 700), 256)
        MatrixBlocks(shape=(300, 700), counts=(2, 3), size=(150, 234))
        """
        rows, columns = (-(-side // largest) for side in shape)
        return cls(shape, (rows, columns), (-(-shape[0] // rows), -(-shape[1] // columns)))

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Shape of the zero-padded matrix."""
        (rows, columns), (height, width) = self.counts, self.size
        return rows * height, columns * width

    def split(self, x: jax.Array) -> jax.Array:
        """Cut (matrices, *shape) into (matrices, *counts, *size)."""
        filled = ((0, whole - side) for whole, side in zip(self.padded_shape, self.shape))
        x = jnp.pad(x, ((0, 0), *filled))
        (rows, columns), (height, width) = self.counts, self.size
        return x.reshape(-1, rows, height, columns, width).swapaxes(2, 3)

    def join(self, x: jax.Array) -> jax.Array:
        """Invert `split`."""
        x = x.swapaxes(2, 3).reshape(-1, *self.padded_shape)
        return x[:, : self.shape[0], : self.shape[1]]
