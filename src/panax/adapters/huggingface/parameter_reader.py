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

_QUANTIZED_COPIES = 4
"""Copies of a piece in float32 that quantization takes."""

_ROWS_TRANSPOSED = 64

Ranges = tuple[tuple[int, int], ...]
"""First and last index, exclusive, of each dimension of a region."""

Tensors = Mapping[str, Any]
"""Name to a safetensors slice: nothing is read before it is indexed."""

ReadFn = Callable[[Ranges], tuple[Any, ...]]
"""Reads the same region of one or several arrays."""


def read_array(match: ParameterMatch, tensors: Tensors) -> jax.Array:
    """Read one parameter, with the sharding of its leaf."""
    leaf = match.leaf

    def read(ranges: Ranges) -> tuple[np.ndarray]:
        return (_read(match, tensors, ranges, leaf.dtype),)

    return _read_sharded((leaf,), (1,), read, PIECE_BYTES // leaf.dtype.itemsize)[0]


def read_quantized(match: ParameterMatch, weight: QuantizedWeight, tensors: Tensors) -> QuantizedWeight:
    """Read one parameter as codes and scales, with the shardings of the codes and scales of `weight`, real or abstract.

    Tensors in the weight's own format keep their codes and scales; others are quantized, from float32.

    Raises:
        CheckpointError: A tensor is stored in the format in other blocks.
    """
    stored = [
        match.tensor(place) for place in match.places if is_stored_in(tensors[match.tensor(place)], weight.format)
    ]

    def read(ranges: Ranges) -> tuple[jax.Array, jax.Array]:
        values = _read_inputs(match, weight, tensors, ranges)
        scales, codes, exact = _quantize(values, weight.format, weight.block)
        if stored and not exact:
            raise CheckpointError(
                f"{stored[0]} is stored in 4 bits, in other blocks than {weight.block} values along its inputs; load it in "
                f'16 bits: leave adapter.base "same"'
            )
        return scales, codes

    codes_of_block = weight.block // weight.format.packed
    limit = PIECE_BYTES // (_QUANTIZED_COPIES * 4 * weight.block)
    scales, codes = _read_sharded((weight.scales, weight.codes), (1, codes_of_block), read, limit)
    fields = (weight.format, weight.inner, weight.num_outputs, weight.block, weight.value_dtype)
    return QuantizedWeight(codes, scales, *fields)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize(values: jax.Array, format: Format, block: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return scales, codes, and True if they represent the values exactly."""
    parts = quantize(values, format, block)
    return parts.scales, parts.codes, (parts.dequantize() == values).all()


def _read_inputs(match: ParameterMatch, weight: QuantizedWeight, tensors: Tensors, ranges: Ranges) -> np.ndarray:
    """Read the blocks with a region of scales, as (*copies, *outputs, inputs), in float32."""
    *kept, (low, high) = ranges
    first = len(ranges) - 1 - weight.num_outputs
    copies, outputs, inner = kept[:first], kept[first:], math.prod(weight.inner)
    low, high = low * weight.block, high * weight.block
    start, stop = low // inner, -(-high // inner)
    region = (*copies, (start, stop), *((0, size) for size in weight.inner), *outputs)
    values = _read(match, tensors, region, np.dtype(np.float32))
    last = first + weight.num_inputs
    turned = np.moveaxis(values, range(first, last), range(values.ndim - weight.num_inputs, values.ndim))
    flat = turned.reshape(*(b - a for a, b in kept), (stop - start) * inner)
    return flat[..., low - start * inner : high - start * inner]


def _read_sharded(leaves: tuple[Any, ...], multiples: tuple[int, ...], read: ReadFn, limit: int) -> list[jax.Array]:
    """Read arrays with the shardings of `leaves`, which are split alike.

    Args:
        multiples: For each, how many of its elements along the last dimension belong to one of the first array's.
        limit: Elements of the first array that are read at a time.
    """
    first, arrays = leaves[0], {}
    if first.sharding is None:
        return _read_to_devices(leaves, multiples, read, limit, tuple((0, size) for size in first.shape), [None])[0]
    devices: dict[Ranges, list[Any]] = {}
    for device, index in first.sharding.addressable_devices_indices_map(first.shape).items():
        devices.setdefault(tuple(index_ranges(first.shape, index)), []).append(device)
    for ranges, same in devices.items():
        arrays |= zip(same, _read_to_devices(leaves, multiples, read, limit, ranges, same))
    return [
        jax.make_array_from_single_device_arrays(
            leaf.shape,
            leaf.sharding,
            [arrays[device][number] for device in leaf.sharding.addressable_devices_indices_map(leaf.shape)],
        )
        for number, leaf in enumerate(leaves)
    ]


def _read_to_devices(
    leaves: tuple[Any, ...],
    multiples: tuple[int, ...],
    read: ReadFn,
    limit: int,
    ranges: Ranges,
    devices: list[Any],
) -> list[list[jax.Array]]:
    """Read a region of arrays once, and return it on each of the devices (None: uncommitted).

    A large region is read in pieces, each written to the devices before the next, so that the host holds one piece in
    addition to the parameters.
    """
    pieces = split_ranges(ranges, max(1, limit))
    if len(pieces) == 1:
        return [[jax.device_put(part, device) for part in parts] for parts in [read(ranges)] for device in devices]
    arrays = []
    for device in devices:
        shapes = [_stretched([high - low for low, high in ranges], multiple) for multiple in multiples]
        arrays.append([jnp.zeros(shape, leaf.dtype, device=device) for shape, leaf in zip(shapes, leaves)])
    for piece in pieces:
        parts = read(piece)
        starts = [
            _stretched([at - low for (at, _), (low, _) in zip(piece, ranges)], multiple) for multiple in multiples
        ]
        for there, device in zip(arrays, devices):
            there[:] = [
                _write_piece(array, jax.device_put(part, device), tuple(map(np.int32, start)))
                for array, part, start in zip(there, parts, starts)
            ]
    return arrays


def _stretched(sizes: list[int], multiple: int) -> list[int]:
    return [*sizes[:-1], sizes[-1] * multiple] if sizes else []


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
    """Read a region of a parameter; the padding of the vocabulary, which the files lack, is zero."""
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
    """Copy and convert a few rows of the file at a time, 2 to 8 times as fast as a transposed matrix at once."""
    rows = max(range(part.ndim), key=lambda axis: abs(part.strides[axis]), default=0)
    if rows == 0:
        out[...] = part
        return
    for start in range(0, part.shape[rows], _ROWS_TRANSPOSED):
        index = (slice(None),) * rows + (slice(start, start + _ROWS_TRANSPOSED),)
        out[index] = part[index]
