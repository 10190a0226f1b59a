"""FP8 weights with scales of blocks (DeepSeek, Qwen 3), of rows or of whole tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .slices import FLOAT8, DequantizedSlice, TensorSlice, check_scales


def read_float8(
    name: str, tensors: dict[str, TensorSlice], settings: Mapping[str, Any]
) -> tuple[str, DequantizedSlice] | None:
    """Take a weight and its scales out of `tensors`; None if the tensor is of another kind."""
    if not name.endswith(".weight"):
        return None
    if f"{name}_scale_inv" in tensors:
        scale = tensors.pop(f"{name}_scale_inv")
        return name, _dequantize_blocks(name, tensors.pop(name), scale, block_sizes(settings) or (1, 1))
    if f"{name}_scale" in tensors and tensors[name].get_dtype() in FLOAT8:
        scale = tensors.pop(f"{name}_scale")
        return name, _dequantize_rows(name, tensors.pop(name), scale)
    return None


def block_sizes(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rows and columns of a block with one scale."""
    block = settings.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        return None
    return block[0], block[1]


def _dequantize_blocks(name: str, weight: TensorSlice, scale: TensorSlice, block: tuple[int, int]) -> DequantizedSlice:
    """Return a matrix with one scale per block; blocks at its end may be smaller."""
    shape, blocks = weight.get_shape(), scale.get_shape()
    check_scales(name, blocks, [-(-size // part) for size, part in zip(shape, block, strict=False)])

    def read(rows: range, columns: range) -> np.ndarray:
        part = weight[rows.start : rows.stop, columns.start : columns.stop].astype(np.float32)
        at = np.ix_(np.arange(rows.start, rows.stop) // block[0], np.arange(columns.start, columns.stop) // block[1])
        return part * scale[...].astype(np.float32)[at]

    return DequantizedSlice(shape, read)


def _dequantize_rows(name: str, weight: TensorSlice, scale: TensorSlice) -> DequantizedSlice:
    """Return a matrix with a scale for each row, or one scale for all rows."""
    shape, sizes = weight.get_shape(), scale.get_shape()
    one = int(np.prod(sizes)) == 1
    check_scales(name, [] if one else sizes, [] if one else [shape[0], 1])

    def read(rows: range, columns: range) -> np.ndarray:
        part = weight[rows.start : rows.stop, columns.start : columns.stop].astype(np.float32)
        scales = scale[...].astype(np.float32).reshape(-1, 1)
        return part * (scales if one else scales[rows.start : rows.stop])

    return DequantizedSlice(shape, read)
