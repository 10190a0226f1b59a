"""A GGUF file as metadata and slices of tensors, by the package `gguf`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ....core.errors import CheckpointError
from ...extras import import_extra
from ..quantized.slices import DequantizedSlice, TensorSlice

if TYPE_CHECKING:
    from gguf import ReaderTensor

GGUF = ".gguf"
"""Suffix of the files' names."""

READ = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""Types of tensors that are read."""


class GgufFile(NamedTuple):
    """The content of a file.

    Attributes:
        metadata: Values by key, without those of the tokenizer that are lists.
        tensors: Name to a slice that is dequantized as it is read.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorSlice]


def find_gguf(folder: Path) -> Path | None:
    """Return the only GGUF file of a folder without a config.json, or None.

    Raises:
        CheckpointError: There are several GGUF files.
    """
    if (folder / "config.json").is_file():
        return None
    files = sorted(folder.glob(f"*{GGUF}"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise CheckpointError(f"{folder} holds {len(files)} GGUF files ({names}); expected one, move the others away")
    return files[0] if files else None


@contextmanager
def open_gguf(path: Path) -> Iterator[GgufFile]:
    """Open a file, which is mapped into memory.

    Raises:
        CheckpointError: The file is damaged, or has tensors of an unsupported type.
        RecipeError: The package `gguf` is not installed.
    """
    gguf = import_extra("gguf", "gguf")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not (name.startswith("tokenizer.") and field.types[:1] == [gguf.GGUFValueType.ARRAY])
        }
        tensors = {tensor.name: _slice(path, tensor) for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError, MemoryError) as error:
        raise CheckpointError(
            f"{path} can't be read: {type(error).__name__}: {error}; it is incomplete or no GGUF file: fetch it again"
        ) from error
    yield GgufFile(metadata, tensors)


def _slice(path: Path, tensor: "ReaderTensor") -> TensorSlice:
    """Return a tensor with its dimensions in the order of arrays."""
    dequantize = import_extra("gguf.quants", "gguf").dequantize

    kind, shape = tensor.tensor_type, [int(size) for size in reversed(tensor.shape)]
    if kind.name not in READ:
        raise CheckpointError(f"{path}: {tensor.name} is of the type {kind.name}; expected one of {', '.join(READ)}")
    # Rows of bytes: blocks lie along the last dimension.
    rows = tensor.data.reshape(*shape[:-1], -1)

    def read(*ranges: range) -> np.ndarray:
        *outer, last = (slice(part.start, part.stop) for part in ranges)
        part = rows[tuple(outer)]
        if kind.name == "F32":
            return np.asarray(part[..., last], np.float32)
        flat = np.ascontiguousarray(part).reshape(-1, part.shape[-1])
        if not len(flat):
            return np.zeros([len(part) for part in ranges], np.float32)
        if kind.name == "F16":
            return flat.reshape(part.shape)[..., last].astype(np.float32)
        wide = dequantize(flat, kind).astype(np.float32)
        return wide.reshape(*part.shape[:-1], shape[-1])[..., last]

    return DequantizedSlice(shape, read)
