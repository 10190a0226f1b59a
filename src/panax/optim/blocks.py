"""Matrices cut into blocks of one shape."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class MatrixBlocks(NamedTuple):
    """How a matrix is cut: evenly, with zeros behind it where it does not divide.

    Attributes:
        shape: Of the matrix.
        counts: How many blocks lie below each other, and beside each other.
        size: Of one.
    """

    shape: tuple[int, int]
    counts: tuple[int, int]
    size: tuple[int, int]

    @classmethod
    def of(cls, shape: tuple[int, int], largest: int) -> "MatrixBlocks":
        """
        Args:
            largest: No side of a block is larger.

        >>> MatrixBlocks.of((300, 700), 256)
        MatrixBlocks(shape=(300, 700), counts=(2, 3), size=(150, 234))
        """
        rows, columns = (-(-side // largest) for side in shape)
        return cls(shape, (rows, columns), (-(-shape[0] // rows), -(-shape[1] // columns)))

    @property
    def whole(self) -> tuple[int, int]:
        """The shape with what fills up."""
        (rows, columns), (height, width) = self.counts, self.size
        return rows * height, columns * width

    def cut(self, x: jax.Array) -> jax.Array:
        """(matrices, *shape) to (matrices, *counts, *size)."""
        filled = ((0, whole - side) for whole, side in zip(self.whole, self.shape))
        x = jnp.pad(x, ((0, 0), *filled))
        (rows, columns), (height, width) = self.counts, self.size
        return x.reshape(-1, rows, height, columns, width).swapaxes(2, 3)

    def joined(self, x: jax.Array) -> jax.Array:
        """The way back."""
        x = x.swapaxes(2, 3).reshape(-1, *self.whole)
        return x[:, : self.shape[0], : self.shape[1]]
