"""Rows of tables, file by file and a block at a time: CSV, Parquet and NumPy's `.npz`. No size stored in a
file is trusted."""

import contextlib
import csv
import io
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from panax.core.errors import DataError

from ..files.bounds import describe_oversize
from ..files.decompression import SUFFIXES, BoundedStream, is_compressed, open_file
from ..files.files import read_error
from ..files.magic import detect_format
from ..files.zip_files import open_zip
from ..formats.columns import ARROW_ERRORS, check_buffers, read_parquet_batches
from ..formats.fields import missing_library_error
from ..formats.npy_header import read_npy_header
from ..text.corpus import BadRecord

_ROWS_AT_ONCE = 4096
_BLOCK_BYTES = 2**24

_READ_KINDS = "biufSU"
"""NumPy's kinds of booleans, numbers and text: dates, complex numbers and records are not valid in a
table."""


class RowBlock(NamedTuple):
    """Some rows of a table.

    Attributes:
        columns: Their values, by the name of the column; one list each.
        where: The location of each row, for messages.
        bad: Rows that could not be split into fields.
    """

    columns: Mapping[str, Sequence[Any]]
    where: Sequence[str]
    bad: Sequence[BadRecord] = ()


def read_blocks(
    path: Path, name: str, columns: list[str], max_record_bytes: int, *, lists: bool = False
) -> Iterator[RowBlock]:
    """Yield the rows of one file in blocks, with only these columns.

    Args:
        max_record_bytes: Maximum size of a record, in bytes.
        lists: True if a column of a Parquet file may hold lists.

    Raises:
        DataError: The file can't be read, is not a table, lacks a column, or a row is too large.
    """
    plain = name.lower()
    while plain.endswith((*SUFFIXES, ".zip")):
        plain = plain.rpartition(".")[0]
    kind = plain.rpartition(".")[2]
    try:
        match _kind_of_bytes(path) or kind:
            case "csv" | "tsv" | "inter":
                yield from _csv_blocks(path, name, columns, "," if kind == "csv" else "\t", max_record_bytes)
            case "parquet":
                yield from _parquet_blocks(path, name, columns, max_record_bytes, lists)
            case "npz":
                yield from _numpy_blocks(path, name, columns, max_record_bytes)
            case _:
                raise DataError(
                    f"{name} is not a table; expected .csv, .tsv, .inter (also {', '.join(SUFFIXES)} or .zip), .parquet or .npz"
                )
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise read_error(name, error) from error


class _Lines:
    """Lines of a text file; a line, or a row of several lines, is limited to the size of a record."""

    def __init__(self, file: Any, name: str, max_record_bytes: int) -> None:
        self._file, self._name, self._max_bytes = file, name, max_record_bytes
        self._number = self.row_size = 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._file.readline(self._max_bytes + 1 - self.row_size)
        self._number += 1
        self.row_size += len(line)
        if self.row_size > self._max_bytes:
            raise DataError(
                f"{self._name}, line {self._number}: {describe_oversize(self.row_size, self._max_bytes, at_least=True)}"
            )
        if not line:
            raise StopIteration
        return line


def _csv_blocks(path: Path, name: str, columns: list[str], delimiter: str, max_record_bytes: int) -> Iterator[RowBlock]:
    # Bytes that are not UTF-8 become surrogates, so that only their row is bad.
    with (
        _open_unpacked(path, name) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        lines = _Lines(file, name, max_record_bytes)
        rows = csv.reader(lines, delimiter=delimiter)
        try:
            heading = next(rows, [])
            _check_columns(columns, heading, name)
            places = {column: heading.index(column) for column in columns}
            while block := _next_rows(rows, lines, name):
                complete_rows = [(where, row) for where, row in block if len(row) == len(heading)]
                bad = [
                    BadRecord(where, f"{len(row)} values; expected {len(heading)}, as in the heading")
                    for where, row in block
                    if row and len(row) != len(heading)
                ]
                values = {column: [row[place] for _, row in complete_rows] for column, place in places.items()}
                yield RowBlock(values, [where for where, _ in complete_rows], bad)
        except csv.Error as error:
            raise DataError(f"{name}, line {rows.line_num}: {error}; expected CSV: repair it") from None


@contextlib.contextmanager
def _open_unpacked(path: Path, name: str) -> Iterator[Any]:
    """Open a file's bytes, decompressed: for an archive, those of its single file."""
    if not zipfile.is_zipfile(path):
        if name.lower().endswith(SUFFIXES) and not is_compressed(path):
            raise read_error(name, OSError("its name ends like that of a compressed file, but it is not compressed"))
        with open_file(path, name) as file:
            yield file
        return
    with open_zip(path) as archive:
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        if len(entries) != 1:
            raise DataError(f"{name} holds {len(entries)} files; expected one table: unpack it")
        if entries[0].flag_bits & 1 or entries[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DataError(f"{name} is encrypted, or compressed with method {entries[0].compress_type}; unpack it")
        size = entries[0].compress_size
        with (
            archive.open(entries[0]) as file,
            io.BufferedReader(BoundedStream(file, lambda: size, name, "zip")) as bounded,
        ):
            yield bounded


def _next_rows(rows: Any, lines: _Lines, name: str) -> list[tuple[str, list[str]]]:
    """Return the next rows, with their locations."""
    block, size = [], 0
    while len(block) < _ROWS_AT_ONCE and size < _BLOCK_BYTES:
        lines.row_size = 0
        row = next(rows, None)
        if row is None:
            break
        block.append((f"{name}, line {rows.line_num}", row))
        size += lines.row_size
    return block


def _parquet_blocks(
    path: Path, name: str, columns: list[str], max_record_bytes: int, lists: bool
) -> Iterator[RowBlock]:
    try:
        import pyarrow as arrow
    except ImportError as error:
        raise missing_library_error("pyarrow", "a Parquet table", "parquet") from error

    def check(present: Sequence[str], name: str) -> None:
        _check_columns(columns, present, name)

    try:
        row = 0
        for batch in read_parquet_batches(
            path, name, columns, max_record_bytes=max_record_bytes, rows=_ROWS_AT_ONCE, check=check, lists=lists
        ):
            for column in columns:
                check_buffers(batch.column(column))
            where = [f"{name}, row {number}" for number in range(row, row + batch.num_rows)]
            yield RowBlock({column: batch.column(column).to_pylist() for column in columns}, where)
            row += batch.num_rows
    except (*ARROW_ERRORS, arrow.ArrowException) as error:
        if isinstance(error, DataError):
            raise
        raise read_error(name, error) from error


def _numpy_blocks(path: Path, name: str, columns: list[str], max_record_bytes: int) -> Iterator[RowBlock]:
    """Yield rows of an archive's arrays, read as a stream, so that no size stored in the archive is allocated."""
    try:
        with open_zip(path) as archive, contextlib.ExitStack() as opened:
            present = [entry.removesuffix(".npy") for entry in archive.namelist()]
            _check_columns(columns, present, name)
            arrays = {column: _open_array(archive, column, opened) for column in columns}
            shapes = {column: shape for column, (_, shape, _) in arrays.items()}
            if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
                raise DataError(f"{name} has columns of the shapes {shapes}; expected one dimension, of one length")
            row_bytes = sum(dtype.itemsize for _, _, dtype in arrays.values())
            if row_bytes > max_record_bytes:
                raise DataError(f"{name}, each row: {describe_oversize(row_bytes, max_record_bytes)}")
            (count,) = shapes[columns[0]]
            step = max(1, min(_ROWS_AT_ONCE, _BLOCK_BYTES // max(1, row_bytes)))
            for begin in range(0, count, step):
                rows = min(step, count - begin)
                part = {column: _read_values(file, dtype, rows) for column, (file, _, dtype) in arrays.items()}
                yield RowBlock(part, [f"{name}, row {number}" for number in range(begin, begin + rows)])
    except DataError:
        raise
    except (
        ValueError,
        KeyError,
        IndexError,
        OverflowError,
        NotImplementedError,
        RuntimeError,
        MemoryError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DataError(
            f"{name} is not an .npz file that can be read ({error}); expected np.savez of plain arrays"
        ) from None


def _open_array(
    archive: zipfile.ZipFile, column: str, opened: contextlib.ExitStack
) -> tuple[Any, tuple[int, ...], np.dtype]:
    """Open an array of an archive, positioned after its header."""
    entry = archive.getinfo(f"{column}.npy")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"column {column!r} is compressed with method {entry.compress_type}")
    file = opened.enter_context(archive.open(entry))
    shape, _, dtype, _ = read_npy_header(file, f"column {column!r}")
    if dtype.kind not in _READ_KINDS:
        raise ValueError(f"column {column!r} holds {dtype}; expected numbers or texts")
    return file, shape, dtype


def _read_values(file: Any, dtype: np.dtype, rows: int) -> list[Any]:
    """Return the next values of an array."""
    data = file.read(rows * dtype.itemsize)
    if len(data) != rows * dtype.itemsize:
        raise ValueError(
            f"an array ends {rows * dtype.itemsize - len(data)} bytes before the end that its header states"
        )
    if dtype.kind == "U" and dtype.itemsize:
        # Python makes strings of any codes, and fails when they are read.
        codes = np.frombuffer(data, np.dtype("u4").newbyteorder(dtype.byteorder))
        if len(codes) and codes.max() > sys.maxunicode:
            raise ValueError(f"a text holds the code {codes.max():#x}, which is not a character")
    return np.ndarray(rows, dtype, data).tolist()


def _kind_of_bytes(path: Path) -> str | None:
    """Return a file's format by its first bytes, if they identify it; a name may be wrong."""
    with path.open("rb") as file:
        kind = detect_format(file.read(16))
    if kind == "zip":
        with open_zip(path) as archive:
            names = archive.namelist()
        return "npz" if names and all(entry.endswith(".npy") for entry in names) else None
    return "parquet" if kind == "Parquet" else None


def _check_columns(columns: Sequence[str], present: Sequence[str], name: str) -> None:
    twice = next((column for column in columns if list(present).count(column) > 1), None)
    if twice is not None:
        raise DataError(f"{name} has two columns {twice!r}; expected one: rename or remove one of them")
    lacking = [column for column in columns if column not in present]
    if lacking:
        raise DataError(f"{name} has no column {lacking[0]!r}; it has {', '.join(map(repr, present)) or 'none at all'}")
