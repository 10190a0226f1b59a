"""8-bit codes over seven decades, for values of many magnitudes: the moments of an optimizer.

Source: arXiv:1511.04561, arXiv:2110.02861; the map is that of bitsandbytes and of torchao's 8-bit optimizers.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt32

from .formats import Format, uniform_from_bits

DECADES = 7


@dataclasses.dataclass(frozen=True)
class DynamicMap(Format):
    """256 values in [-1, 1] or [0, 1]: a decade has twice as many as the one below it, evenly spaced.

    A code is an index in `values`. Difference from the published map: if a block's value of largest magnitude
    is negative, the scale maps it to the map's least value, since the map has 1 but no -1.

    >>> DynamicMap(signed=False).encode(jnp.array([0.0, 1e-6, 1.0])).tolist()
    [0, 2, 255]
    """

    signed: bool = True

    largest: ClassVar[float] = 1.0  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.uint8)

    @property
    def zero(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _tables(self.signed).zero

    @property
    def values(self) -> np.ndarray:
        """Return the values of the codes, ascending, in float32."""
        return _tables(self.signed).values

    def compute_scale(self, split: Float32[Array, "..."], dims: tuple[int, ...]) -> Float32[Array, "..."]:
        # There is a code for 1 and none for -1: a block's largest value would lose 0.7 % in each update if it
        # is negative.
        if not self.signed:
            return super().compute_scale(split, dims)
        smallest = float(self.values[0])
        return jnp.maximum(jnp.max(split, dims, keepdims=True), jnp.min(split, dims, keepdims=True) * (1 / smallest))

    def encode(self, x: Float32[Array, "..."], bits: UInt32[Array, "..."] | None = None) -> jax.Array:
        tables = _tables(self.signed)
        size = jnp.abs(x) if self.signed else x
        # Approximate position: the decade, and the position in it. Only the tables are exact, one step up or
        # down from there.
        decade = sum((size >= edge).astype(jnp.int32) for edge in tables.edges)
        far = jnp.asarray(tables.slopes)[decade] * size + jnp.asarray(tables.offsets)[decade]
        about = jnp.floor(far).astype(jnp.int32)
        zero = tables.zero
        code = jnp.clip(jnp.where(x < 0, zero - about, zero + about), 0, 255)
        lower, upper = jnp.asarray(tables.lower), jnp.asarray(tables.upper)
        code = code - (x < lower[code]).astype(jnp.int32) + (x >= upper[code]).astype(jnp.int32)
        if bits is not None:
            values = jnp.asarray(tables.values)
            code = jnp.maximum(code - (x < values[code]).astype(jnp.int32), 0)
            up = jnp.minimum(code + 1, 255)
            below, above = values[code], values[up]
            code = jnp.where(x - below > uniform_from_bits(bits) * (above - below), up, code)
        return code.astype(jnp.uint8)

    def decode(self, codes: jax.Array) -> Float32[Array, "..."]:
        return jnp.asarray(self.values)[codes.astype(jnp.int32)]


@dataclasses.dataclass(frozen=True)
class _Tables:
    """Tables for encoding.

    Attributes:
        lower, upper: For each code, the smallest number that rounds to it, and the smallest that rounds to
        the next.
        edges: Beginnings of the decades, without the first.
        slopes, offsets: For each decade, the linear map from a number's magnitude to the number of codes
        between it and zero's.
        zero: The code of zero.
    """

    values: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    edges: tuple[float, ...]
    slopes: np.ndarray
    offsets: np.ndarray
    zero: int


@functools.cache
def _tables(signed: bool) -> _Tables:
    one = np.float32(1)
    counts = [2 ** (i if signed else i + 1) for i in range(DECADES)]
    powers = [10.0 ** (i - DECADES + 1) for i in range(DECADES)]
    # In float32, as the published map is computed: other roundings would give other values.
    entries: list[np.float32] = [np.float32(0), one]
    for count, power in zip(counts, powers):
        bounds = _evenly(count + 1)
        means = np.float32(power) * ((bounds[:-1] + bounds[1:]) / np.float32(2))
        entries += [*means, *(-means if signed else ())]
    values = np.sort(np.array(entries, np.float32))
    zero = int(np.searchsorted(values, 0))
    between = _least_above(values)
    # A decade spans from a tenth of its power to the power, in equal intervals; a code is the middle of its
    # interval.
    edges = tuple(powers[:-1])
    slopes = [count / (0.9 * power) for count, power in zip(counts, powers)]
    firsts = np.cumsum([1, *counts[:-1]])
    offsets = [first - 0.1 * slope * power for first, slope, power in zip(firsts, slopes, powers)]
    return _Tables(
        values,
        np.concatenate([[-np.inf], between]).astype(np.float32),
        np.concatenate([between, [np.inf]]).astype(np.float32),
        edges,
        np.array(slopes, np.float32),
        np.array(offsets, np.float32),
        zero,
    )


def _evenly(count: int) -> np.ndarray:
    """Return values from 0.1 to 1, in steps of float32, each half computed from its own end, rounded once."""
    first, last = np.float32(0.1), np.float32(1)
    step = np.float64((last - first) / np.float32(count - 1))
    index = np.arange(count)
    return np.where(index < count // 2, first + step * index, last - step * (count - 1 - index)).astype(np.float32)


def _least_above(values: np.ndarray) -> np.ndarray:
    """Return, between two values, the smallest number nearer to the upper one in float32 subtraction: ties go
    up."""
    below, above = values[:-1], values[1:]
    half = (above - below) * np.float32(0.5)
    thresholds = below + half
    for _ in range(4):
        thresholds = np.where(thresholds - below >= half, np.nextafter(thresholds, np.float32(-np.inf)), thresholds)
    for _ in range(8):
        thresholds = np.where(thresholds - below >= half, thresholds, np.nextafter(thresholds, np.float32(np.inf)))
    assert (thresholds - below >= half).all()
    return thresholds
