"""4-bit codes: int4 with scales of groups (Kimi K2), and bitsandbytes' NF4 and FP4, with scales that may be quantized too."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....core.errors import CheckpointError
from ....kernels.quantized import NF4
from ....system import json_reader
from .slices import DequantizedSlice, TensorSlice, check_scales

_BITS_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
"""Tensors stored with one of bitsandbytes: scales of blocks and the values of codes; and the same of quantized scales."""


def read_int4(
    name: str, tensors: dict[str, TensorSlice], settings: Mapping[str, Any]
) -> tuple[str, DequantizedSlice] | None:
    """Take a packed weight and its scales out of `tensors`; None if the tensor is of another kind."""
    base = name.removesuffix("_packed")
    if not name.endswith(".weight_packed") or f"{base}_scale" not in tensors:
        return None
    shape = _shape_of(base, tensors.pop(f"{base}_shape", None))
    return base, _dequantize_nibbles(base, tensors.pop(name), tensors.pop(f"{base}_scale"), shape)


def read_codes(
    name: str, tensors: dict[str, TensorSlice], settings: Mapping[str, Any]
) -> tuple[str, DequantizedSlice] | None:
    """Take a weight of bitsandbytes, its scales and its state out of `tensors`; None if the tensor is of another kind."""
    state = _bits_state(name, tensors)
    if state is None:
        return None
    parts = {part: tensors.pop(f"{name}.{part}", None) for part in _BITS_PARTS}
    return name, _dequantize_codes(name, tensors.pop(name), parts, _read_state(name, tensors.pop(state)))


def _bits_state(name: str, tensors: Mapping[str, TensorSlice]) -> str | None:
    """Return the name of the state stored with a tensor of bitsandbytes."""
    states = (f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
    return next((state for state in states if state in tensors), None)


def _read_state(name: str, state: TensorSlice) -> dict[str, Any]:
    """Read the settings of a tensor, which are JSON in a tensor."""
    try:
        settings = json_reader.parse(np.ravel(state[...]).astype(np.uint8).tobytes())
        sizes = [*settings["shape"], settings["blocksize"], settings.get("nested_blocksize", 1)]
        sound = len(settings["shape"]) == 2 and all(type(size) is int and size > 0 for size in sizes)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{name}: its quant_state can't be read: {error!r}") from error
    if not sound:
        raise CheckpointError(
            f"{name}: its quant_state is {settings}; expected rows and columns, and positive blocksizes"
        )
    return settings


def _dequantize_codes(
    name: str, weight: TensorSlice, parts: Mapping[str, TensorSlice | None], settings: Mapping[str, Any]
) -> DequantizedSlice:
    """Return a matrix of two codes in a byte, the first one in its high bits, with a scale for each block of all values."""
    (rows, columns), block = settings["shape"], settings["blocksize"]
    scales, values = _read_part(name, "absmax", parts), _read_part(name, "quant_map", parts)
    if scales.dtype == np.uint8:
        nested = settings.get("nested_blocksize", 1)
        outer, codes = _read_part(name, "nested_absmax", parts), _read_part(name, "nested_quant_map", parts)
        check_scales(name, [len(codes), len(outer)], [256, -(-len(scales) // nested)])
        scales = codes[scales] * np.repeat(outer, nested)[: len(scales)] + np.float32(
            settings.get("nested_offset", 0.0)
        )
    check_scales(
        name,
        [int(np.prod(weight.get_shape())), len(scales), len(values)],
        [-(-rows * columns // 2), -(-rows * columns // block), 16],
    )

    def read(row_range: range, column_range: range) -> np.ndarray:
        first, last = row_range.start * columns, row_range.stop * columns
        flat = weight[first // 2 : -(-last // 2)].reshape(-1)
        nibbles = np.stack([flat >> 4, flat & 0xF], axis=1).reshape(-1)[first % 2 : first % 2 + last - first]
        wide = values[nibbles] * scales[np.arange(first, last) // block]
        return wide.reshape(len(row_range), columns)[:, column_range.start : column_range.stop]

    return DequantizedSlice([rows, columns], read, NF4 if tuple(values.tolist()) == NF4.values else None)


def _read_part(name: str, part: str, parts: Mapping[str, TensorSlice | None]) -> np.ndarray:
    """Read a part of a quantized tensor completely; codes stay bytes, other values become float32."""
    tensor = parts[part]
    if tensor is None:
        raise CheckpointError(f"{name} is quantized, and {name}.{part} is missing")
    array = np.ravel(tensor[...])
    return array if array.dtype == np.uint8 else array.astype(np.float32)


def _shape_of(name: str, shape: TensorSlice | None) -> list[int]:
    """Return the rows and columns of a packed matrix."""
    sizes = [] if shape is None else [int(size) for size in np.ravel(shape[...])]
    if len(sizes) != 2 or min(sizes) <= 0:
        raise CheckpointError(f"{name} is packed, and its weight_shape is {sizes}; expected rows and columns")
    return sizes


def _dequantize_nibbles(name: str, packed: TensorSlice, scale: TensorSlice, shape: list[int]) -> DequantizedSlice:
    """Return a matrix of eight int4 in an int32, the lowest bits first, with a scale for each group of a row."""
    groups = scale.get_shape()[-1] if scale.get_shape() else 0
    width = -(-shape[1] // groups) if groups else 0
    check_scales(name, [*packed.get_shape(), groups], [shape[0], -(-shape[1] // 8), -(-shape[1] // max(width, 1))])

    def read(rows: range, columns: range) -> np.ndarray:
        first, last = columns.start // 8, -(-columns.stop // 8)
        words = packed[rows.start : rows.stop, first:last].astype(np.uint32)
        nibbles = (words[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 0xF
        values = nibbles.reshape(len(words), 8 * words.shape[1])[
            :, columns.start - 8 * first : columns.stop - 8 * first
        ]
        scales = scale[rows.start : rows.stop, :].astype(np.float32)
        return (values.astype(np.float32) - 8.0) * scales[:, np.arange(columns.start, columns.stop) // width]

    return DequantizedSlice(shape, read)
