"""The header of a NumPy array in a file, and the offset of an archive's member. No pickled value is ever
loaded."""

import tokenize
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...system.binary_reader import BinaryError, read_number
from ..files.zip_files import open_zip

_MOST_DIMENSIONS = 32
_LOCAL_HEADER = 30


class NpyHeader(NamedTuple):
    """Content of an array's header.

    Attributes:
        begin: Offset of its values, in bytes from byte 0 of the file's stream.
    """

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype
    begin: int


def read_npy_header(file: Any, name: str) -> NpyHeader:
    """Read the header of format 1.0 at a file's position; the file's position is then at the first value.

    Args:
        name: The array's name, for messages.

    Raises:
        ValueError: The data is not such a header, or has values that no array has.
        OSError: The file can't be read.
    """
    try:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):  # headers of later versions may be of any size
            raise ValueError(f"{name} is of version {version} of the format; plain arrays are of (1, 0)")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except (TypeError, KeyError, IndexError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError) as error:
        raise ValueError(f"{name} has a header that is not one ({error})") from None
    if dtype.hasobject:
        raise ValueError(f"{name} holds objects, which are pickled and never loaded")
    if len(shape) > _MOST_DIMENSIONS or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(
            f"{name} has the shape {str(shape)[:100]}; expected at most {_MOST_DIMENSIONS} lengths, none below 0"
        )
    return NpyHeader(shape, fortran, dtype, file.tell())


def map_npy(path: Path, name: str, begin: int = 0) -> np.ndarray:
    """Memory-map the array that begins at a byte of a file, without reading it.

    Raises:
        ValueError: There is no array at this byte, or it reaches beyond the file's end.
        OSError: The file can't be read.
    """
    with path.open("rb") as file:
        file.seek(begin)
        header = read_npy_header(file, name)
        size = file.seek(0, 2)
    count = header.dtype.itemsize
    for length in header.shape:
        count *= length
    if header.begin + count > size:
        raise ValueError(f"{name} takes {count:,} bytes from byte {header.begin:,} on; the file has {size:,}")
    if not count:
        return np.zeros(header.shape, header.dtype)
    order = "F" if header.fortran else "C"
    return np.memmap(path, header.dtype, "r", header.begin, header.shape, order)


def find_member_offset(path: Path, member: str) -> int:
    """Return the offset of the bytes of an uncompressed member of an archive.

    Raises:
        ValueError: The member is compressed or encrypted, or is beyond the archive's end.
        KeyError: The member does not exist.
        OSError: The archive can't be read.
        zipfile.BadZipFile: The file is not a zip archive.
    """
    with open_zip(path) as archive, path.open("rb") as file:
        entry = archive.getinfo(member)
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise ValueError(f"{member!r} is compressed or encrypted; write it by np.savez")
        if entry.header_offset < 0:
            raise BinaryError(f"{member!r} begins at byte {entry.header_offset}")
        file.seek(entry.header_offset)
        head = file.read(_LOCAL_HEADER)
        return entry.header_offset + _LOCAL_HEADER + read_number(head, 26, "<H") + read_number(head, 28, "<H")
