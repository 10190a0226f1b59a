"""Quantized releases, read as float32: FP8 with scales of blocks (DeepSeek, Qwen 3), of rows or of tensors; packed int4 with
scales of groups (Kimi K2); bitsandbytes' NF4 and FP4, with scales that are quantized themselves or not. A slice that is read is
dequantized alone; nothing is kept."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ...core.errors import CheckpointError
from ...system import json_reader
from ...system.binary_reader import read_number
from .json_values import RefuseFn

KEY = "quantization_config"

MOST_HEADER_BYTES = 100_000_000
"""The longest header that safetensors reads."""

FLOAT8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
"""Dtypes of FP8 by safetensors' names, which NumPy does not know."""

WAYS_OUT = {
    "gptq": "dequantize it once, or take the release that it was made from",
    "awq": "dequantize it once, or take the release that it was made from",
    "bitsandbytes": "4 bits are read, and 8 are not: load it with transformers, call model.dequantize(), and save_pretrained",
    "mxfp4": "load it with transformers, dequantized by its Mxfp4Config, and save_pretrained",
}
"""Methods that are not read, and what to do instead."""


class TensorSlice(Protocol):
    """A tensor of a file, of which nothing is read before it is indexed."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any) -> np.ndarray: ...


class Float8Slice:
    """An FP8 tensor of a safetensors file, mapped into memory."""

    def __init__(self, path: Path, start: int, shape: list[int], dtype: str):
        self._shape, self._dtype = shape, dtype
        count = int(np.prod(shape))
        self._bytes = np.memmap(path, np.uint8, "r", start, (count,)) if count else np.zeros(0, np.uint8)

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self._bytes.reshape(self._shape)[index]).view(FLOAT8[self._dtype])


class DequantizedSlice:
    """A matrix of which the parts that are read are dequantized.

    Args:
        shape: Rows and columns.
        read: (rows, columns) as ranges to a float32 block.
    """

    def __init__(self, shape: list[int], read: Callable[[range, range], np.ndarray]):
        self._shape, self._read = shape, read

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> np.ndarray:
        parts = index if isinstance(index, tuple) else (slice(None), slice(None)) if index is Ellipsis else (index,)
        parts = (*parts, *(slice(None),) * (2 - len(parts)))
        rows, columns = (range(*part.indices(size)) for part, size in zip(parts, self._shape, strict=True))
        return self._read(rows, columns)


def check_quantization(raw: Mapping[str, Any], refuse: RefuseFn) -> None:
    """Refuse the quantization that config.json declares if its weights can't be read."""
    settings = raw.get(KEY)
    if settings is None:
        return
    if not isinstance(settings, Mapping):
        refuse(KEY, "expected an object with a quant_method")
    method = settings.get("quant_method")
    if method == "fp8" and _block(settings) is not None:
        return
    if method == "bitsandbytes" and settings.get("load_in_4bit") is True:
        return
    if method == "compressed-tensors" and settings.get("format") in ("float-quantized", "pack-quantized"):
        if settings["format"] == "pack-quantized" and not all(_is_int4(group) for group in _groups(settings)):
            refuse(KEY, "packed weights are read if they are symmetric int4 with scales of groups or rows")
        return
    way = WAYS_OUT.get(str(method), "convert it to bfloat16 first")
    refuse(KEY, f"weights of quant_method={method!r} are not read; {way}")


def dequantize(tensors: Mapping[str, TensorSlice], settings: Any) -> dict[str, Any]:
    """Return tensors of which the quantized ones are read as float32, without their scales.

    Args:
        settings: The value of `quantization_config`; None if there is none.

    Raises:
        CheckpointError: Scales don't belong to their weights.
    """
    if not isinstance(settings, Mapping):
        return dict(tensors)
    wide = dict(tensors)
    for name in tensors:
        base = name.removesuffix("_packed")
        if name.endswith(".weight") and f"{name}_scale_inv" in tensors:
            wide[name] = _of_blocks(name, tensors[name], wide.pop(f"{name}_scale_inv"), _block(settings) or (1, 1))
        elif name.endswith(".weight") and f"{name}_scale" in tensors and tensors[name].get_dtype() in FLOAT8:
            wide[name] = _of_rows(name, tensors[name], wide.pop(f"{name}_scale"))
        elif name.endswith(".weight_packed") and f"{base}_scale" in tensors:
            shape = _shape_of(base, wide.pop(f"{base}_shape", None))
            wide[base] = _of_nibbles(base, wide.pop(name), wide.pop(f"{base}_scale"), shape)
        elif (state := _bits_state(name, tensors)) is not None:
            parts = {part: wide.pop(f"{name}.{part}", None) for part in _BITS_PARTS}
            wide[name] = _of_codes(name, tensors[name], parts, _read_state(name, wide.pop(state)))
    return wide


def float8_slices(path: Path) -> dict[str, Float8Slice]:
    """Return the FP8 tensors of a safetensors file that was opened before, so that its header is sound."""
    with path.open("rb") as file:
        length = read_number(file.read(8), 0, "<Q")
        header = json_reader.parse(file.read(length), most_bytes=MOST_HEADER_BYTES)
    return {
        name: Float8Slice(path, 8 + length + entry["data_offsets"][0], entry["shape"], entry["dtype"])
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in FLOAT8
    }


_BITS_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
"""Tensors beside one of bitsandbytes: scales of blocks and the values of codes; and the same of quantized scales."""


def _bits_state(name: str, tensors: Mapping[str, TensorSlice]) -> str | None:
    """Return the name of the state beside a tensor of bitsandbytes."""
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


def _of_codes(
    name: str, weight: TensorSlice, parts: Mapping[str, TensorSlice | None], settings: Mapping[str, Any]
) -> DequantizedSlice:
    """Return a matrix of two codes in a byte, the first one in its high bits, with a scale for each block of all values."""
    (rows, columns), block = settings["shape"], settings["blocksize"]
    scales, values = _whole(name, "absmax", parts), _whole(name, "quant_map", parts)
    if scales.dtype == np.uint8:
        nested = settings.get("nested_blocksize", 1)
        outer, codes = _whole(name, "nested_absmax", parts), _whole(name, "nested_quant_map", parts)
        _check_scales(name, [len(codes), len(outer)], [256, -(-len(scales) // nested)], 2)
        scales = codes[scales] * np.repeat(outer, nested)[: len(scales)] + np.float32(
            settings.get("nested_offset", 0.0)
        )
    _check_scales(
        name,
        [int(np.prod(weight.get_shape())), len(scales), len(values)],
        [-(-rows * columns // 2), -(-rows * columns // block), 16],
        2,
    )

    def read(wanted: range, at: range) -> np.ndarray:
        first, last = wanted.start * columns, wanted.stop * columns
        flat = weight[first // 2 : -(-last // 2)].reshape(-1)
        nibbles = np.stack([flat >> 4, flat & 0xF], axis=1).reshape(-1)[first % 2 : first % 2 + last - first]
        wide = values[nibbles] * scales[np.arange(first, last) // block]
        return wide.reshape(len(wanted), columns)[:, at.start : at.stop]

    return DequantizedSlice([rows, columns], read)


def _whole(name: str, part: str, parts: Mapping[str, TensorSlice | None]) -> np.ndarray:
    """Read a part of a quantized tensor; codes stay bytes, all else becomes float32."""
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


def _block(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of a block with one scale."""
    block = settings.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        return None
    return block[0], block[1]


def _groups(settings: Mapping[str, Any]) -> list[Any]:
    groups = settings.get("config_groups")
    return [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else [None]


def _is_int4(weights: Any) -> bool:
    return isinstance(weights, Mapping) and weights.get("num_bits") == 4 and weights.get("symmetric") is True


def _of_blocks(name: str, weight: TensorSlice, scale: TensorSlice, block: tuple[int, int]) -> DequantizedSlice:
    """Return a matrix of which each block has a scale; the last ones may be cut."""
    shape, blocks = weight.get_shape(), scale.get_shape()
    _check_scales(name, blocks, [-(-size // part) for size, part in zip(shape, block, strict=False)], len(shape))

    def read(rows: range, columns: range) -> np.ndarray:
        part = weight[rows.start : rows.stop, columns.start : columns.stop].astype(np.float32)
        at = np.ix_(np.arange(rows.start, rows.stop) // block[0], np.arange(columns.start, columns.stop) // block[1])
        return part * scale[...].astype(np.float32)[at]

    return DequantizedSlice(shape, read)


def _of_rows(name: str, weight: TensorSlice, scale: TensorSlice) -> DequantizedSlice:
    """Return a matrix with a scale for each row, or for all of them."""
    shape, sizes = weight.get_shape(), scale.get_shape()
    one = int(np.prod(sizes)) == 1
    _check_scales(name, [] if one else sizes, [] if one else [shape[0], 1], len(shape))

    def read(rows: range, columns: range) -> np.ndarray:
        part = weight[rows.start : rows.stop, columns.start : columns.stop].astype(np.float32)
        scales = scale[...].astype(np.float32).reshape(-1, 1)
        return part * (scales if one else scales[rows.start : rows.stop])

    return DequantizedSlice(shape, read)


def _of_nibbles(name: str, packed: TensorSlice, scale: TensorSlice, shape: list[int]) -> DequantizedSlice:
    """Return a matrix of eight int4 in an int32, the lowest bits first, with a scale for each group of a row."""
    groups = scale.get_shape()[-1] if scale.get_shape() else 0
    width = -(-shape[1] // groups) if groups else 0
    _check_scales(name, [*packed.get_shape(), groups], [shape[0], -(-shape[1] // 8), -(-shape[1] // max(width, 1))], 2)

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


def _check_scales(name: str, sizes: list[int], expected: list[int], dims: int) -> None:
    if dims != 2 or list(sizes) != expected:
        raise CheckpointError(f"{name}: its scales have the sizes {list(sizes)}; expected {expected} for a matrix")
