"""`QuantizedArray`: an array in fewer bits, as codes and a scale for each block of codes."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt32

from panax.core.params.scopes import nan_for

from .formats import Format

TINY = float(jnp.finfo(jnp.float32).tiny)


class QuantizedArray(eqx.Module):
    """An array as codes and scales: a pytree, so it can be carried, mapped, split and saved like arrays.

    A block is a box of neighboring values with one scale; the last one along a dimension may be partial. Its
    size is stored only for the last dimensions, so leading ones may be added (a stack, `vmap`).

    Attributes:
        codes: Codes in the array's shape; if two codes are packed into a byte, half as many along the last
            dimension.
        scales: One for each block, with the array's number of dimensions.
        block: Size of a block along the last dimensions.
        dtype: Original dtype of the array, and default for dequantization.
    """

    codes: Array
    scales: Float32[Array, "..."]
    format: Format = eqx.field(static=True)
    block: tuple[int, ...] = eqx.field(static=True)
    dtype: Any = eqx.field(static=True)

    @classmethod
    def zeros(
        cls, shape: tuple[int, ...], format: Format, block: int | tuple[int, ...], dtype: Any
    ) -> "QuantizedArray":
        """Return an array of zeros; arguments as in `quantize`."""
        block = _checked(block, shape)
        front, last = shape[: len(shape) - len(block)], shape[len(shape) - len(block) :]
        codes = jnp.full((*shape[:-1], shape[-1] // format.packed), format.zero, format.dtype)
        counts = tuple(-(-size // part) for size, part in zip(last, block))
        return cls(codes, jnp.zeros((*front, *counts), jnp.float32), format, block, jnp.dtype(dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the represented array."""
        *front, last = self.codes.shape
        return (*front, last * self.format.packed)

    @property
    def nbytes(self) -> int:
        """Return the bytes of codes and scales together."""
        return sum(math.prod(part.shape) * part.dtype.itemsize for part in (self.codes, self.scales))

    def dequantize(self, dtype: Any = None) -> jax.Array:
        """Return the array; NaN in blocks that contained NaN or infinity.

        Args:
            dtype: Dtype of the result; None for the original one.
        """
        values = self.format.decode(self.codes)
        split, sizes = _split(values, self.block)
        dims = tuple(range(split.ndim - 2 * len(self.block) + 1, split.ndim, 2))
        padded = (split * jnp.expand_dims(self.scales, dims)).reshape(sizes)
        return _cut(padded, values.shape).astype(self.dtype if dtype is None else dtype)


def quantize(
    x: Array,
    format: Format,
    block: int | tuple[int, ...],
    bits: UInt32[Array, "..."] | None = None,
    dtype: Any = None,
) -> QuantizedArray:
    """Quantize `x`: in each block, values are divided by a scale, which maps the largest magnitude to
    `format.largest` unless the format defines another.

    A block of zeros, or of values too small for a normal float32 scale, becomes zeros. A block with NaN or
    infinity has the scale NaN, so that it is not overlooked.

    Args:
        block: Number of values with one scale, along the last dimension, or along each of the last few.
        bits: Random bits, of x's shape, for stochastic rounding, so that the mean is x; None to round to
            nearest.
        dtype: Dtype of the represented array; None for x's.

    Raises:
        ValueError: A block has no size, or more dimensions than `x`.

    >>> from panax.kernels.quantized import INT8
    >>> small = quantize(jnp.array([[1.0, -0.5, 0.0, 100.0, 50.0]]), INT8, 3)
    >>> small.codes.tolist(), small.scales.shape, small.shape
    ([[127, -64, 0, 127, 64]], (1, 2), (1, 5))
    """
    block = _checked(block, x.shape)
    wide = x.astype(jnp.float32)
    split, sizes = _split(wide, block)
    dims = tuple(range(split.ndim - 2 * len(block) + 1, split.ndim, 2))
    scale = format.compute_scale(split, dims)
    # Checked for each value: a compiled maximum may ignore NaN.
    finite = jnp.all(jnp.isfinite(split), dims, keepdims=True) & jnp.isfinite(scale)
    scale = jnp.where(finite, jnp.where(scale >= TINY, scale, 0.0), nan_for(lambda: ~finite))
    # Blocks without a scale have codes of zeros, not the result of casting NaN.
    fits = scale > 0
    scaled = jnp.where(fits, split / jnp.where(fits, scale, 1.0), 0.0)
    codes = format.encode(_cut(scaled.reshape(sizes), x.shape), bits)
    return QuantizedArray(
        codes, jnp.squeeze(scale, dims), format, block, jnp.dtype(x.dtype if dtype is None else dtype)
    )


def _checked(block: int | tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    block = (block,) if isinstance(block, int) else tuple(block)
    if not block or min(block) < 1 or len(block) > len(shape):
        raise ValueError(
            f"block={block} for an array of the shape {shape}; give 1 or more for each of its last dimensions"
        )
    return block


def _split(x: jax.Array, block: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """Split each of the last dimensions in two, the second of a block's size, padded with zeros; return the
    array and its shape before the split."""
    front, last = x.shape[: x.ndim - len(block)], x.shape[x.ndim - len(block) :]
    counts = [-(-size // part) for size, part in zip(last, block)]
    if any(size % part for size, part in zip(last, block)):
        x = jnp.pad(x, [(0, 0)] * len(front) + [(0, n * part - size) for n, part, size in zip(counts, block, last)])
    parts = [size for pair in zip(counts, block) for size in pair]
    return x.reshape(*front, *parts), x.shape


def _cut(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x if x.shape == shape else x[tuple(slice(size) for size in shape)]
