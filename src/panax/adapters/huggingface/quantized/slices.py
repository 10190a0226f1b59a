"""Slices of tensors in files; only the parts that are read are converted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ....core.errors import CheckpointError
from ....kernels.quantized import Format
from ....system import json_reader
from ....system.binary_reader import read_number

MOST_HEADER_BYTES = 100_000_000
"""The longest header that safetensors reads."""

FLOAT8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
"""Dtypes of FP8 by safetensors' names, which NumPy does not know."""


class TensorSlice(Protocol):
    """A tensor of a file; nothing is read before it is indexed."""

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
    """A tensor that dequantizes the parts that are read.

    Args:
        read: A range along each dimension to a float32 block.
        format: The format of the stored values, if weights can be stored in it without conversion.
    """

    def __init__(self, shape: list[int], read: Callable[..., np.ndarray], format: Format | None = None):
        self._shape, self._read, self.format = shape, read, format

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> np.ndarray:
        parts = index if isinstance(index, tuple) else () if index is Ellipsis else (index,)
        parts = (*parts, *(slice(None),) * (len(self._shape) - len(parts)))
        return self._read(*(range(*part.indices(size)) for part, size in zip(parts, self._shape, strict=True)))


def float8_slices(path: Path) -> dict[str, Float8Slice]:
    """Return the FP8 tensors of a safetensors file with a header that has been validated."""
    with path.open("rb") as file:
        length = read_number(file.read(8), 0, "<Q")
        header = json_reader.parse(file.read(length), max_bytes=MOST_HEADER_BYTES)
    return {
        name: Float8Slice(path, 8 + length + entry["data_offsets"][0], entry["shape"], entry["dtype"])
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in FLOAT8
    }


def is_stored_in(tensor: TensorSlice, format: Format) -> bool:
    """Return True if the values of a tensor of the files, without its scales, are stored in a format."""
    return isinstance(tensor, DequantizedSlice) and tensor.format == format


def check_scales(name: str, sizes: list[int], expected: list[int]) -> None:
    """Raise a CheckpointError if the sizes of a quantized tensor's scales and codes are not the expected ones."""
    if list(sizes) != expected:
        raise CheckpointError(f"{name}: its scales have the sizes {list(sizes)}; expected {expected} for a matrix")
