"""How one number becomes a code, and a code a number: formats without their scales."""

import abc
import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt32

from .packing import pack, unpack


class Format(abc.ABC):
    """The codes of one format: an equal, hashable value, so that it may be static in a compiled program.

    Attributes:
        largest: The number that a block's largest is scaled to.
        packed: How many codes there are in one element of the array of codes.
        zero: The code of 0.
    """

    largest: float
    packed: int = 1
    zero: int = 0

    @property
    @abc.abstractmethod
    def dtype(self) -> jnp.dtype:
        """The type of the array of codes."""

    def compute_scale(self, split: Float32[Array, "..."], dims: tuple[int, ...]) -> Float32[Array, "..."]:
        """What the numbers of each block are divided by, before any check: NaN or infinity where a block holds either.

        Args:
            dims: The dimensions of a block, which are kept with size 1.
        """
        # Not divided: compilers make a product of that in one place and not in another, and scales differ in their last bit.
        return jnp.max(jnp.abs(split), dims, keepdims=True) * (1 / self.largest)

    @abc.abstractmethod
    def encode(self, x: Float32[Array, "..."], bits: UInt32[Array, "..."] | None = None) -> jax.Array:
        """The codes of numbers that are at most `largest` away from zero.

        Args:
            bits: Random ones, of x's shape, to round up or down by chance, so that the mean is x; None for the nearest.
        """

    @abc.abstractmethod
    def decode(self, codes: jax.Array) -> Float32[Array, "..."]:
        """What codes stand for, without a scale."""


@dataclasses.dataclass(frozen=True)
class Linear(Format):
    """Whole numbers from -`largest` to `largest`; those of 4 bits lie two in a byte.

    >>> INT8.encode(jnp.array([-127.0, 0.4, 2.6])).tolist()
    [-127, 0, 3]
    """

    bits: int = 8

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"Linear(bits={self.bits}); expected 4 or 8")

    @property
    def largest(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 2.0 ** (self.bits - 1) - 1

    @property
    def packed(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 8 // self.bits

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.int8 if self.bits == 8 else jnp.uint8)

    def encode(self, x: Float32[Array, "..."], bits: UInt32[Array, "..."] | None = None) -> jax.Array:
        whole = jnp.round(x) if bits is None else jnp.floor(x + uniform_from_bits(bits))
        codes = jnp.clip(whole, -self.largest, self.largest).astype(jnp.int8)
        return codes if self.bits == 8 else pack(codes)

    def decode(self, codes: jax.Array) -> Float32[Array, "..."]:
        return (codes if self.bits == 8 else unpack(codes)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Float8(Format):
    """Floats of 4 bits of exponent and 3 of fraction, without infinities (e4m3fn), as accelerators multiply them.

    >>> FLOAT8.encode(jnp.array([448.0, 1.05, 2.0**-9])).tolist()
    [448.0, 1.0, 0.001953125]
    """

    largest: ClassVar[float] = 448.0  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.float8_e4m3fn)

    def encode(self, x: Float32[Array, "..."], bits: UInt32[Array, "..."] | None = None) -> jax.Array:
        if bits is not None:
            exponent = (jax.lax.bitcast_convert_type(x, jnp.int32) >> 23 & 0xFF) - 127
            # The distance between neighbours, of which the least normal exponent, -6, has the smallest.
            step = jnp.exp2((jnp.maximum(exponent, -6) - 3).astype(jnp.float32))
            # Rounding up goes one step past the largest at most, and there the type has no number but NaN.
            x = jnp.clip(jnp.floor(x / step + uniform_from_bits(bits)) * step, -self.largest, self.largest)
        return x.astype(self.dtype)

    def decode(self, codes: jax.Array) -> Float32[Array, "..."]:
        return codes.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Sign(Format):
    """Signs alone, eight in a byte: each number stands for its block's mean size. Zero counts as positive.

    Source: arXiv:1901.09847, with blocks.

    >>> SIGN.encode(jnp.array([0.5, -2.0, 0.0, 1.0, -1.0, -1.0, -1.0, -1.0])).tolist()
    [13]
    """

    largest: ClassVar[float] = 1.0  # pyright: ignore[reportIncompatibleVariableOverride]
    packed: ClassVar[int] = 8  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.uint8)

    def compute_scale(self, split: Float32[Array, "..."], dims: tuple[int, ...]) -> Float32[Array, "..."]:
        # Divided before they are added up: the sum of large numbers is infinite, their mean is not.
        share = 1 / math.prod(split.shape[dim] for dim in dims)
        return jnp.sum(jnp.abs(split) * share, dims, keepdims=True)

    def encode(self, x: Float32[Array, "..."], bits: UInt32[Array, "..."] | None = None) -> jax.Array:
        if bits is not None:
            raise ValueError("signs are not rounded by chance: numbers lie outside of the two that they stand for")
        return jnp.packbits(x >= 0, axis=-1, bitorder="little")

    def decode(self, codes: jax.Array) -> Float32[Array, "..."]:
        return jnp.unpackbits(codes, axis=-1, bitorder="little").astype(jnp.float32) * 2 - 1


def uniform_from_bits(bits: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    """Numbers in [0, 1) from random bits, of which 24 are used.

    >>> uniform_from_bits(jnp.array([0, 2**31, 2**32 - 1], jnp.uint32)).tolist()
    [0.0, 0.5, 0.9999999403953552]
    """
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


INT8, INT4, FLOAT8, SIGN = Linear(8), Linear(4), Float8(), Sign()
"""Two codes of 4 bits lie in a byte, and eight signs."""
