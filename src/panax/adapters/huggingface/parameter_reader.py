"""Reading of a parameter from the tensors of files: each device's region, in pieces."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.errors import CheckpointError
from ...kernels.quantized import Format, quantize
from ...spmd.composite.quantized_weight import QuantizedWeight
from .quantized import is_stored_in
from .tensor_map import ParameterMatch, index_ranges

PIECE_BYTES = 2**28
"""Largest part of a parameter that is on its way from the files to a device."""

_ROWS_TRANSPOSED = 64

Ranges = tuple[tuple[int, int], ...]
"""First and last index, exclusive, of each dimension of a region."""

Tensors = Mapping[str, Any]
"""Name to a safetensors slice: nothing is read before it is indexed."""

ReadFn = Callable[[Ranges], Any]
"""Reads a region of an array."""


def read_array(match: ParameterMatch, tensors: Tensors) -> jax.Array:
    """Read one parameter, with the sharding of its leaf."""
    leaf = match.leaf
    return _sharded(leaf, lambda ranges: _read(match, tensors, ranges, leaf.dtype), PIECE_BYTES // leaf.dtype.itemsize)


def read_quantized(match: ParameterMatch, weight: QuantizedWeight, tensors: Tensors) -> QuantizedWeight:
    """Read one parameter as codes and scales, with the sharding of those of `weight`, real or abstract.

    Tensors in the weight's own format keep their codes and scales; others are quantized, from float32.

    Raises:
        CheckpointError: A tensor is stored in the format in other blocks.
    """
    kept = [match.tensor(place) for place in match.places if is_stored_in(tensors[match.tensor(place)], weight.format)]

    def part(leaf: Any, which: int) -> jax.Array:
        # Codes or scales of one dimension stand for as many inputs.
        inputs = weight.format.packed if which == 0 else weight.block

        def read(ranges: Ranges) -> jax.Array:
            values = _read_inputs(match, weight, tensors, ranges, inputs)
            codes, scales, exact = _quantized(values, weight.format, weight.block)
            if kept and not exact:
                raise CheckpointError(
                    f"{kept[0]} is stored in 4 bits, in other blocks than {weight.block} values along its inputs; load it in "
                    f'16 bits: leave adapter.base "same"'
                )
            return codes if which == 0 else scales

        # Whole blocks only, and no more than a piece in float32.
        return _sharded(leaf, read, PIECE_BYTES // (4 * inputs))

    codes, scales = part(weight.codes, 0), part(weight.scales, 1)
    fields = (weight.format, weight.inner, weight.num_outputs, weight.block, weight.value_dtype)
    return QuantizedWeight(codes, scales, *fields)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantized(values: jax.Array, format: Format, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return codes, scales, and whether they stand for exactly these values."""
    parts = quantize(values, format, block)
    return parts.codes, parts.scales, (parts.dequantize() == values).all()


def _read_inputs(
    match: ParameterMatch, weight: QuantizedWeight, tensors: Tensors, ranges: Ranges, inputs: int
) -> np.ndarray:
    """Read a region of a matrix as (*copies, *outputs, inputs), in float32.

    Args:
        ranges: Of codes or scales, each of which stands for `inputs` inputs.
    """
    *kept, (low, high) = ranges
    first = len(ranges) - 1 - weight.num_outputs
    copies, outputs, inner = kept[:first], kept[first:], math.prod(weight.inner)
    low, high = low * inputs, high * inputs
    start, stop = low // inner, -(-high // inner)
    wanted = (*copies, (start, stop), *((0, size) for size in weight.inner), *outputs)
    values = _read(match, tensors, wanted, np.dtype(np.float32))
    last = first + weight.num_inputs
    turned = np.moveaxis(values, range(first, last), range(values.ndim - weight.num_inputs, values.ndim))
    flat = turned.reshape(*(b - a for a, b in kept), (stop - start) * inner)
    return flat[..., low - start * inner : high - start * inner]


def _sharded(leaf: Any, read: ReadFn, limit: int) -> jax.Array:
    """Read an array with the sharding of `leaf`, at most `limit` elements at a time."""
    limit = max(1, limit)
    if leaf.sharding is None:
        return _place(leaf, read, limit, tuple((0, size) for size in leaf.shape), [None])[0]
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    devices: dict[Ranges, list[Any]] = {}
    for device, index in indices.items():
        devices.setdefault(tuple(index_ranges(leaf.shape, index)), []).append(device)
    arrays = {}
    for ranges, same in devices.items():
        arrays |= zip(same, _place(leaf, read, limit, ranges, same))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, [arrays[device] for device in indices])


def _place(leaf: Any, read: ReadFn, limit: int, ranges: Ranges, devices: list[Any]) -> list[jax.Array]:
    """Read a region of an array once, and return it on each of the devices (None: uncommitted).

    A large one is read in pieces, each written to the devices before the next: the host holds a piece beside the parameters,
    and not a region.
    """
    pieces = split_ranges(ranges, limit)
    if len(pieces) == 1:
        return [jax.device_put(part, device) for part in [read(ranges)] for device in devices]
    shape = [high - low for low, high in ranges]
    arrays = [jnp.zeros(shape, leaf.dtype, device=device) for device in devices]
    for piece in pieces:
        part = read(piece)
        starts = tuple(np.int32(at - low) for (at, _), (low, _) in zip(piece, ranges))
        arrays = [_write_piece(array, jax.device_put(part, device), starts) for array, device in zip(arrays, devices)]
    return arrays


@functools.partial(jax.jit, donate_argnums=0)
def _write_piece(array: jax.Array, part: jax.Array, starts: tuple[jax.Array, ...]) -> jax.Array:
    return jax.lax.dynamic_update_slice(array, part, starts)


def split_ranges(ranges: Ranges, limit: int) -> list[Ranges]:
    """Split a box into boxes of at most `limit` elements, along its first dimensions, in order.

    >>> split_ranges(((0, 3), (2, 6)), 8)
    [((0, 2), (2, 6)), ((2, 3), (2, 6))]
    >>> split_ranges(((0, 2), (2, 6)), 3)
    [((0, 1), (2, 5)), ((0, 1), (5, 6)), ((1, 2), (2, 5)), ((1, 2), (5, 6))]
    """
    if not ranges or math.prod(high - low for low, high in ranges) <= limit:
        return [ranges]
    (first, last), *inner = ranges
    each = math.prod(high - low for low, high in inner)
    step = max(1, limit // each)
    starts = range(first, last, step)
    if step > 1 or not inner:
        return [((at, min(at + step, last)), *inner) for at in starts]
    return [((at, at + 1), *rest) for at in starts for rest in split_ranges(tuple(inner), limit)]


def _read(match: ParameterMatch, tensors: Tensors, ranges: Ranges, dtype: np.dtype) -> np.ndarray:
    """Read a region of a parameter; zeros in the padding of the vocabulary, which the files don't have."""
    pattern, sizes, stacked = match.source.pattern, match.sizes, len(match.stacked)
    out = np.zeros([high - low for low, high in ranges], dtype)
    inside = [
        (min(low, sizes[axis]), min(high, sizes[axis])) for axis, (low, high) in zip(match.axes, ranges[stacked:])
    ]
    filled = tuple(slice(high - low) for low, high in inside)
    if all(high > low for low, high in inside):
        for place in itertools.product(*(range(*r) for r in ranges[:stacked])):
            part = pattern.read(tensors[match.tensor(place)], match.axes, sizes, inside, match.source.part)
            at = tuple(i - low for i, (low, _) in zip(place, ranges))
            _copy(part, out[(*at, *filled, ...)])
    return out


def _copy(part: np.ndarray, out: np.ndarray) -> None:
    """Copy and convert, a few rows of the file at a time: 2 to 8 times as fast as a transposed matrix at once."""
    rows = max(range(part.ndim), key=lambda axis: abs(part.strides[axis]), default=0)
    if rows == 0:
        out[...] = part
        return
    for start in range(0, part.shape[rows], _ROWS_TRANSPOSED):
        index = (slice(None),) * rows + (slice(start, start + _ROWS_TRANSPOSED),)
        out[index] = part[index]
