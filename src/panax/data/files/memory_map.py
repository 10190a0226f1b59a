"""Memory-mapped arrays in files: a file that is truncated while in use raises an error instead of killing the
process."""

import mmap
from pathlib import Path

import numpy as np

from panax.core.errors import DataError

from .files import read_error


def map_file(path: Path, dtype: np.dtype | str, shape: tuple[int, ...], remedy: str) -> np.ndarray:
    """Map a file as a row-major array, without reading it.

    Args:
        remedy: Advice for the error message if the file has another size.

    Raises:
        DataError: The file can't be read, or its size is not that of the array.
    """
    dtype = np.dtype(dtype)
    count = 1
    for length in shape:
        count *= length
    try:
        size, expected = path.stat().st_size, count * dtype.itemsize
        if size != expected:
            raise DataError(
                f"{path} has {size} bytes; expected {expected} ({count} of {dtype.name}): it is damaged or cut short; {remedy}"
            )
        # An empty file can't be mapped.
        return np.memmap(path, dtype, mode="r", shape=shape).view(np.ndarray) if size else np.zeros(shape, dtype)
    except OSError as error:
        raise read_error(path, error) from error


def check_mapped(*arrays: np.ndarray | None) -> None:
    """Check that the files of mapped arrays are still as long as when they were mapped: reading beyond a
    file's end kills the process.

    Any array may be passed; only a `numpy.memmap`, or a view of one, has a file. The check takes about a
    microsecond.

    Raises:
        DataError: A file was truncated.
    """
    for array in arrays:
        base: object = array
        mapped: np.memmap | None = None
        while isinstance(base, np.ndarray):
            mapped = base if isinstance(base, np.memmap) else mapped
            base = base.base
        if isinstance(base, mmap.mmap) and mapped is not None:
            expected = mapped.offset - mapped.offset % mmap.ALLOCATIONGRANULARITY + len(base)
            actual = base.size()
            if actual < expected:
                raise DataError(
                    f"{mapped.filename} was cut short to {actual:,} bytes while it was in use; expected {expected:,}: "
                    f"restore it (Panax remakes files of its cache) and run the same command again"
                )
