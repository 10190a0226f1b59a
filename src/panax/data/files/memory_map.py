"""Arrays in files, mapped into memory: a file that is cut short while it is in use is an error, not the end of the process."""

import mmap
from pathlib import Path

import numpy as np

from panax.core.errors import DataError

from .files import read_error


def map_file(path: Path, dtype: np.dtype | str, shape: tuple[int, ...], remedy: str) -> np.ndarray:
    """The array that a file is, row-major, without reading it.

    Args:
        remedy: What to do where the file has another size.

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
        # Nothing can't be mapped.
        return np.memmap(path, dtype, mode="r", shape=shape).view(np.ndarray) if size else np.zeros(shape, dtype)
    except OSError as error:
        raise read_error(path, error) from error


def check_mapped(*arrays: np.ndarray | None) -> None:
    """See that the files of mapped arrays are as long as when they were mapped: reading beyond a file's end kills the process.

    Any array may be given; only those that are, or are views of, `numpy.memmap` have a file. It takes about a microsecond.

    Raises:
        DataError: A file was cut short.
    """
    for array in arrays:
        base: object = array
        mapped: np.memmap | None = None
        while isinstance(base, np.ndarray):
            mapped = base if isinstance(base, np.memmap) else mapped
            base = base.base
        if isinstance(base, mmap.mmap) and mapped is not None:
            expected = mapped.offset - mapped.offset % mmap.ALLOCATIONGRANULARITY + len(base)
            found = base.size()
            if found < expected:
                raise DataError(
                    f"{mapped.filename} was cut short to {found:,} bytes while it was in use; expected {expected:,}: restore it "
                    f"(what Panax keeps in its cache it makes again) and run the same command again"
                )
