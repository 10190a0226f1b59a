"""Formats with a table of values, one for each 4-bit code."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt32

from .formats import Format
from .packing import pack, unpack


@dataclasses.dataclass(frozen=True)
class CodeTable(Format):
    """Sixteen values from -1 to 1 in ascending order; codes are packed two in a byte.

    >>> NF4.encode(jnp.array([-1.0, 0.0, 0.03, 0.9])).tolist()
    [112, 247]
    >>> NF4.decode(jnp.array([112, 247], jnp.uint8)).tolist()
    [-1.0, 0.0, 0.0, 1.0]
    """

    values: tuple[float, ...]
    largest: float = 1.0

    def __post_init__(self) -> None:
        if len(self.values) != 16 or list(self.values) != sorted(self.values) or 0.0 not in self.values:
            raise ValueError(f"CodeTable(values={self.values}); expected 16 ascending values, one of them 0")

    @property
    def packed(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 2

    @property
    def zero(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.values.index(0.0) * 0x11

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.uint8)

    def encode(self, x: Float32[Array, "..."], bits: UInt32[Array, "..."] | None = None) -> jax.Array:
        if bits is not None:
            raise ValueError("stochastic rounding is not defined for a table of values; round to nearest")
        table = np.asarray(self.values, np.float32)
        steps = ((x > middle).astype(jnp.int8) for middle in (table[1:] + table[:-1]) / 2)
        return pack(functools.reduce(jnp.add, steps))

    def decode(self, codes: jax.Array) -> Float32[Array, "..."]:
        codes = unpack(codes)
        # Selections by the bits of a code, which all devices vectorize; a lookup in a table is slow on some.
        level = [jnp.float32(value) for value in self.values]
        for bit in (1, 2, 4, 8):
            chosen = (codes & bit) != 0
            level = [jnp.where(chosen, high, low) for low, high in zip(level[::2], level[1::2])]
        return level[0]


NF4 = CodeTable(
    (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    )
)
"""NormalFloat of 4 bits: each value is as probable as any other for normally distributed weights. Usually with a scale for
each 64 values.

Source: arXiv:2305.14314, Appendix E.
"""
