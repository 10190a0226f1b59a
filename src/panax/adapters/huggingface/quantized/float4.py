"""FP4 weights (E2M1), two in a byte, the first in its low bits: MXFP4 with a power of two for each 32 values (gpt-oss), and
NVFP4 with an FP8 scale for each 16 and one for the tensor (NVIDIA's releases).

Source: the OCP Microscaling Formats specification 1.0, sections 5.3.3 and 6.3.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ....core.errors import CheckpointError
from .slices import FLOAT8, DequantizedSlice, TensorSlice, check_scales

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = np.asarray([*_POSITIVE, *(-value for value in _POSITIVE)], np.float32)
"""Values of the 16 codes."""

MX_BLOCK, NV_BLOCK = 32, 16
"""Values that share a scale."""


def read_mxfp4(
    name: str, tensors: dict[str, TensorSlice], settings: Mapping[str, Any]
) -> tuple[str, DequantizedSlice] | None:
    """Take the experts of a layer out of `tensors`; None if the tensor is of another kind.

    They are stored as [expert, n, k / 32, 16] blocks of rows, and read as [expert, k, n].
    """
    base = name.removesuffix("_blocks")
    if not name.endswith("_blocks") or f"{base}_scales" not in tensors:
        return None
    blocks, scales = tensors.pop(name), tensors.pop(f"{base}_scales")
    experts, rows, groups, width = sizes = blocks.get_shape() if len(blocks.get_shape()) == 4 else [0, 0, 0, 0]
    if width != MX_BLOCK // 2 or blocks.get_dtype() != "U8" or scales.get_dtype() != "U8":
        raise CheckpointError(
            f"{name}: {blocks.get_dtype()}{blocks.get_shape()} with scales {scales.get_dtype()}; expected U8 of 4 dimensions, "
            f"the last of {MX_BLOCK // 2}, and scales U8"
        )
    check_scales(base, scales.get_shape(), sizes[:3])

    def read(expert: range, inner: range, outer: range) -> np.ndarray:
        first, last = inner.start // MX_BLOCK, -(-inner.stop // MX_BLOCK)
        at = slice(expert.start, expert.stop), slice(outer.start, outer.stop), slice(first, last)
        exponents = scales[at].astype(np.int32) - 127
        values = np.ldexp(VALUES[_nibbles(blocks[at])], exponents[..., None])
        flat = values.reshape(*values.shape[:2], (last - first) * MX_BLOCK)
        start = first * MX_BLOCK
        return flat[:, :, inner.start - start : inner.stop - start].swapaxes(1, 2)

    return base, DequantizedSlice([experts, groups * MX_BLOCK, rows], read)


def read_float4(
    name: str, tensors: dict[str, TensorSlice], settings: Mapping[str, Any]
) -> tuple[str, DequantizedSlice] | None:
    """Take a matrix of rows of FP4 and its scales out of `tensors`; None if the tensor is of another kind.

    The form is that of compressed-tensors ("weight_packed", divided by "weight_global_scale" if there is one) or of
    NVIDIA's ModelOpt ("weight", multiplied by "weight_scale_2").
    """
    base = name.removesuffix("_packed")
    packed = name.endswith(".weight_packed")
    tensor_scale = f"{base}_global_scale" if packed else f"{base}_scale_2"
    if not base.endswith(".weight") or f"{base}_scale" not in tensors or tensors[name].get_dtype() != "U8":
        return None
    if not packed and tensor_scale not in tensors:
        raise CheckpointError(f"{name} holds FP4, and {tensor_scale} is missing")
    codes, scale, of_all = tensors.pop(name), tensors.pop(f"{base}_scale"), tensors.pop(tensor_scale, None)
    shape, grouped = codes.get_shape(), of_all is not None
    block = NV_BLOCK if grouped else MX_BLOCK
    expected = [shape[0], 2 * shape[1] // block] if len(shape) == 2 else [0, 0]
    check_scales(base, scale.get_shape(), expected)
    known = scale.get_dtype() in FLOAT8 if grouped else scale.get_dtype() == "U8"
    if not known:
        raise CheckpointError(f"{base}: its scales hold {scale.get_dtype()}; expected {'FP8' if grouped else 'U8'}")
    factor = np.float32(1.0) if of_all is None else _one(tensor_scale, of_all)

    def read(rows: range, columns: range) -> np.ndarray:
        first, last = columns.start // block, -(-columns.stop // block)
        values = VALUES[_nibbles(codes[rows.start : rows.stop, first * block // 2 : last * block // 2])]
        scales = scale[rows.start : rows.stop, first:last]
        if not grouped:
            wide = np.ldexp(np.float32(1.0), scales.astype(np.int32) - 127)
        else:
            wide = scales.astype(np.float32) / factor if packed else scales.astype(np.float32) * factor
        start = first * block
        return (values * np.repeat(wide, block, axis=1))[:, columns.start - start : columns.stop - start]

    return base, DequantizedSlice([shape[0], 2 * shape[1]], read)


def _one(name: str, tensor: TensorSlice) -> np.float32:
    values = np.ravel(tensor[...]).astype(np.float32)
    if len(values) != 1 or not np.isfinite(values[0]) or values[0] == 0:
        raise CheckpointError(f"{name} is {values[:3].tolist()}; expected one number that is not 0")
    return values[0]


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Return the codes of the last dimension's bytes, twice as many."""
    return np.stack([codes & 0xF, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 2 * codes.shape[-1])
