"""Encoding of single values to codes and back: formats without their scales."""

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
        largest: The value that a block's largest is scaled to.
        packed: Number of codes in one element of the array of codes.
        zero: The code of 0.
    """

    largest: float
    packed: int = 1
    zero: int = 0

    @property
    @abc.abstractmethod
    def dtype(self) -> jnp.dtype:
        """Return the dtype of the array of codes."""

    def compute_scale(self, split: Float32[Array, "..."], dims: tuple[int, ...]) -> Float32[Array, "..."]:
        """Return the divisor of each block's values, before any check: NaN or infinity if a block contains
        either.

        Args:
            dims: The dimensions of a block, which become size 1.
        """
        # Not divided: compilers turn the division into a multiplication in some places only, and scales would
        # differ in the last bit.
        return jnp.max(jnp.abs(split), dims, keepdims=True) * (1 / self.largest)

    @abc.abstractmethod
    def encode(self, x: Float32[Array, "..."], bits: UInt32[Array, "..."] | None = None) -> jax.Array:
        """Encode values of magnitude at most `largest`.

        Args:
            bits: Random bits, of x's shape, for stochastic rounding, so that the mean is x; None to round to
                nearest.
        """

    @abc.abstractmethod
    def decode(self, codes: jax.Array) -> Float32[Array, "..."]:
        """Decode codes to values, without a scale."""


@dataclasses.dataclass(frozen=True)
class Linear(Format):
    """Whole numbers from -`largest` to `largest`; those of 4 bits are packed two in a byte.

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
    """Floats of 4 bits of exponent and 3 of fraction, without infinities (e4m3fn), the format of
    accelerators.

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
            # The distance between neighbors; it is smallest at the least normal exponent, -6.
            step = jnp.exp2((jnp.maximum(exponent, -6) - 3).astype(jnp.float32))
            # Rounding up exceeds the largest by at most one step, and there the dtype only has NaN.
            x = jnp.clip(jnp.floor(x / step + uniform_from_bits(bits)) * step, -self.largest, self.largest)
        return x.astype(self.dtype)

    def decode(self, codes: jax.Array) -> Float32[Array, "..."]:
        return codes.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Sign(Format):
    """Signs alone, eight in a byte: each value becomes plus or minus its block's mean magnitude. Zero counts
    as positive.

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
        # Divided before the sum: the sum of large values may be infinite, their mean is not.
        share = 1 / math.prod(split.shape[dim] for dim in dims)
        return jnp.sum(jnp.abs(split) * share, dims, keepdims=True)

    def encode(self, x: Float32[Array, "..."], bits: UInt32[Array, "..."] | None = None) -> jax.Array:
        if bits is not None:
            raise ValueError(
                "stochastic rounding is not defined for signs: values lie outside of the two that they encode"
            )
        return jnp.packbits(x >= 0, axis=-1, bitorder="little")

    def decode(self, codes: jax.Array) -> Float32[Array, "..."]:
        return jnp.unpackbits(codes, axis=-1, bitorder="little").astype(jnp.float32) * 2 - 1


def uniform_from_bits(bits: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    """Convert random bits, 24 of each, to values in [0, 1).

    >>> uniform_from_bits(jnp.array([0, 2**31, 2**32 - 1], jnp.uint32)).tolist()
    [0.0, 0.5, 0.9999999403953552]
    """
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


INT8 = Linear(8)
"""Integers of 8 bits times a scale per block."""

INT4 = Linear(4)
"""Integers of 4 bits times a scale per block; two are packed into a byte."""

FLOAT8 = Float8()
"""Floats of 8 bits times a scale per block."""

SIGN = Sign()
"""One bit per value, times a scale per block; eight are packed into a byte."""
