"""Tables as examples: numbers and categories from CSV, Parquet or NumPy files, for recommenders and the like.

They are read through once, into arrays in the cache that are memory-mapped from then on.
"""

import csv
import dataclasses
import gzip
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import xxhash

from panax.core.errors import DataError, RecipeError

from .cache import cached
from .checksums import SEEN, read_sealed, write_sealed
from .corpus import BadRecord
from .examples import Arrays, Skipped
from .fields import not_installed
from .files import BadRecordError, each_here, file_marks, find_files, fingerprint, unreadable
from .mapped import map_file

FORMAT_VERSION = 1
_PATTERNS = ("**/*.csv", "**/*.csv.gz", "**/*.tsv", "**/*.tsv.gz", "**/*.parquet", "**/*.npz")
_ROWS_AT_ONCE = 4096
_LARGEST_ID = 2**31 - 1
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


class Block(NamedTuple):
    """Some rows of a table.

    Attributes:
        columns: Their values, by the name of the column; one list each.
        where: The place of each row, for messages.
        bad: Rows that could not be taken apart.
    """

    columns: Mapping[str, Sequence[Any]]
    where: Sequence[str]
    bad: Sequence[BadRecord] = ()


class Row(NamedTuple):
    """The values of one row, by leaf."""

    numeric: list[float]
    categorical: list[int]
    label: float | int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of CSV (`.csv`, `.tsv`, also `.gz`), Parquet or NumPy (`.npz`, one array a column) files.

    A batch has `numeric`, float32 (batch, column), `categorical`, int32 (batch, column), and `label` (batch), as far as
    columns are named. A row in which a value is missing or none is a bad record.

    Attributes:
        paths: Files, directories or globs, also of object stores.
        numeric: Columns of numbers.
        categorical: Columns of categories: whole numbers from 0, or anything, where `hash_buckets` is given.
        label: The column to be learnt; None: none.
        label_type: "float32", or "int32" for classes and counts.
        missing: What an empty value of a numeric column stands for; None: it makes the row a bad record.
        hash_buckets: So many ids for each categorical column: a value's id is its hash, modulo this. An empty value is one too.
            None: the values are the ids.
    """

    paths: tuple[str, ...]
    numeric: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    label: str | None = None
    label_type: Literal["float32", "int32"] = "float32"
    missing: float | int | None = None
    hash_buckets: int | None = None

    def __post_init__(self) -> None:
        names = self._columns()
        if not (self.numeric or self.categorical) or len(set(names)) < len(names):
            raise RecipeError(
                f"the columns {names} of a table; expected one or more, each once, in numeric= or categorical="
            )
        if self.hash_buckets is not None and not (self.categorical and 0 < self.hash_buckets <= _LARGEST_ID):
            raise RecipeError(
                f"hash_buckets={self.hash_buckets}; expected 1 to {_LARGEST_ID}, with categorical= columns to hash"
            )

    def open(self, root: Path, max_bad_records: int) -> Arrays:
        """Open the arrays; make them first where there are none.

        Raises:
            DataError: A file can't be read or lacks a column, there is no row, or too many bad ones.
        """
        files = find_files(self.paths, _PATTERNS)
        settings = (self.numeric, self.categorical, self.label, self.label_type, self.missing, self.hash_buckets)
        name = f"table-v{FORMAT_VERSION}-{fingerprint('table', *settings, *file_marks(files))}"
        counted = Skipped(max_bad_records)
        arrays, bad = cached(
            root,
            name,
            build=lambda directory: self._build(files, directory, counted),
            read=lambda directory: self._read(directory, root / SEEN),
        )
        Skipped(max_bad_records).begin(bad)
        return Arrays(arrays, content=name)

    def _columns(self) -> list[str]:
        return [*self.numeric, *self.categorical, *(() if self.label is None else (self.label,))]

    def _dtypes(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Of each leaf, its dtype and the shape of a row."""
        label = np.dtype("<f4" if self.label_type == "float32" else "<i4")
        leaves = {
            "numeric": (np.dtype("<f4"), (len(self.numeric),)),
            "categorical": (np.dtype("<i4"), (len(self.categorical),)),
            "label": (label, ()),
        }
        wanted = {"numeric": self.numeric, "categorical": self.categorical, "label": self.label is not None}
        return {leaf: kind for leaf, kind in leaves.items() if wanted[leaf]}

    def _build(self, files: list[Any], directory: Path, skipped: Skipped) -> None:
        count = 0
        outputs: dict[str, BinaryIO] = {leaf: (directory / f"{leaf}.bin").open("wb") for leaf in self._dtypes()}
        try:
            for name, path in each_here(files):
                for block in _blocks(path, name, self._columns()):
                    rows = self._rows(block, skipped)
                    count += len(rows)
                    for leaf, (dtype, _) in self._dtypes().items():
                        outputs[leaf].write(np.array([getattr(row, leaf) for row in rows], dtype).tobytes())
        finally:
            for file in outputs.values():
                file.close()
        if not count:
            raise DataError(f"the table {', '.join(self.paths)} has no usable row; expected at least one")
        header = {"num_rows": count, "bad_records": skipped.bad}
        write_sealed(directory / "header.json", header, [f"{leaf}.bin" for leaf in outputs])

    def _rows(self, block: Block, skipped: Skipped) -> list[Row]:
        """The usable rows of a block."""
        for record in block.bad:
            skipped.add(record)
        columns = [block.columns[name] for name in self._columns()]
        first, second = len(self.numeric), len(self.numeric) + len(self.categorical)
        rows = []
        for where, *values in zip(block.where, *columns, strict=True):
            try:
                rows.append(self._row(values[:first], values[first:second], values[second:], where))
            except BadRecordError as error:
                skipped.add(BadRecord(error.where, error.reason))
        return rows

    def _row(self, numbers: list[Any], categories: list[Any], label: list[Any], where: str) -> Row:
        return Row(
            [self._number(*pair, where) for pair in zip(self.numeric, numbers, strict=True)],
            [self._category(*pair, where) for pair in zip(self.categorical, categories, strict=True)],
            self._label(label[0], where) if label else None,
        )

    def _number(self, column: str, value: Any, where: str) -> float:
        if self.missing is not None and _is_empty(value):
            return self.missing
        hint = "; give missing= for empty ones" if _is_empty(value) else ""
        return _finite(column, value, where, hint)

    def _category(self, column: str, value: Any, where: str) -> int:
        if self.hash_buckets is None:
            return _whole(column, value, where, "; or give hash_buckets=")
        text = "" if _is_empty(value) else str(value)
        try:
            return xxhash.xxh64_intdigest(f"{column}\0{text}".encode()) % self.hash_buckets
        except UnicodeEncodeError:
            raise BadRecordError(where, f"column {column!r} holds {value!r}, which is not UTF-8; convert it") from None

    def _label(self, value: Any, where: str) -> float | int:
        assert self.label is not None
        return (_whole if self.label_type == "int32" else _finite)(self.label, value, where)

    def _read(self, directory: Path, seen: Path) -> tuple[dict[str, np.ndarray], list[BadRecord]]:
        path = directory / "header.json"
        header = read_sealed(path, seen)
        try:
            count = int(header["num_rows"])
            bad = [BadRecord(str(where), str(reason)) for where, reason in header["bad_records"]]
        except (ValueError, KeyError, TypeError) as error:
            raise unreadable(path, error) from error
        remedy = "remove its folder, and it is made again"
        leaves = self._dtypes().items()
        return {
            leaf: map_file(directory / f"{leaf}.bin", dtype, (count, *shape), remedy) for leaf, (dtype, shape) in leaves
        }, bad


def _blocks(path: Path, name: str, columns: list[str]) -> Iterator[Block]:
    """The rows of one file, in blocks; of its columns, only these."""
    kind = name.removesuffix(".gz").rpartition(".")[2].lower()
    try:
        match kind:
            case "csv" | "tsv":
                yield from _csv_blocks(path, name, columns, "\t" if kind == "tsv" else ",")
            case "parquet":
                yield from _parquet_blocks(path, name, columns)
            case "npz":
                yield from _numpy_blocks(path, name, columns)
            case _:
                raise DataError(f"{name} is no table; expected .csv, .tsv (also .gz), .parquet or .npz")
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(name, error) from error


def _csv_blocks(path: Path, name: str, columns: list[str], delimiter: str) -> Iterator[Block]:
    opened = gzip.open if name.endswith(".gz") else open
    # Bytes that are not UTF-8 become half characters, so that only their row is bad.
    with opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file, delimiter=delimiter)
        try:
            heading = next(rows, [])
            _check_columns(columns, heading, name)
            places = {column: heading.index(column) for column in columns}
            while block := [(f"{name}, line {rows.line_num}", row) for row in itertools.islice(rows, _ROWS_AT_ONCE)]:
                whole = [(where, row) for where, row in block if len(row) == len(heading)]
                bad = [
                    BadRecord(where, f"{len(row)} values; expected {len(heading)}, as in the heading")
                    for where, row in block
                    if row and len(row) != len(heading)
                ]
                values = {column: [row[place] for _, row in whole] for column, place in places.items()}
                yield Block(values, [where for where, _ in whole], bad)
        except csv.Error as error:
            raise DataError(f"{name}, line {rows.line_num}: {error}; expected CSV: repair it") from None


def _parquet_blocks(path: Path, name: str, columns: list[str]) -> Iterator[Block]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise not_installed("pyarrow", "a Parquet table", "parquet") from error
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            _check_columns(columns, file.schema_arrow.names, name)
            row = 0
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=columns):
                    where = [f"{name}, row {number}" for number in range(row, row + batch.num_rows)]
                    yield Block({column: batch.column(column).to_pylist() for column in columns}, where)
                    row += batch.num_rows
    except arrow.ArrowException as error:
        raise unreadable(name, error) from error


def _numpy_blocks(path: Path, name: str, columns: list[str]) -> Iterator[Block]:
    try:
        with np.load(path, allow_pickle=False) as file:
            _check_columns(columns, list(file), name)
            arrays = {column: file[column] for column in columns}
    except (ValueError, zlib.error, AttributeError) as error:
        raise DataError(
            f"{name} is no .npz file that can be read ({error}); expected np.savez of plain arrays"
        ) from None
    shapes = {column: array.shape for column, array in arrays.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise DataError(f"{name} has columns of the shapes {shapes}; expected one dimension, of one length")
    for begin in range(0, len(arrays[columns[0]]), _ROWS_AT_ONCE):
        part = {column: array[begin : begin + _ROWS_AT_ONCE].tolist() for column, array in arrays.items()}
        rows = len(part[columns[0]])
        yield Block(part, [f"{name}, row {number}" for number in range(begin, begin + rows)])


def _check_columns(columns: Sequence[str], present: Sequence[str], name: str) -> None:
    lacking = [column for column in columns if column not in present]
    if lacking:
        raise DataError(f"{name} has no column {lacking[0]!r}; it has {', '.join(map(repr, present)) or 'none at all'}")


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _finite(column: str, value: Any, where: str, hint: str = "") -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST_FLOAT:
        raise BadRecordError(where, f"column {column!r} holds {value!r}; expected a finite number{hint}")
    return number


def _whole(column: str, value: Any, where: str, hint: str = "") -> int:
    try:
        number = int(value)
        exact = isinstance(value, str) or number == value
    except (TypeError, ValueError, OverflowError):
        number, exact = -1, False
    if not exact or not 0 <= number <= _LARGEST_ID:
        raise BadRecordError(where, f"column {column!r} holds {value!r}; expected a whole number from 0 on{hint}")
    return number
