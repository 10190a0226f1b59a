"""Tables as examples: numbers and categories from CSV, Parquet or NumPy files, for recommenders and the like.

They are read through once, into arrays in the cache that are memory-mapped from then on.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import xxhash

from panax.core.errors import DataError, RecipeError
from panax.core.validated import Validated

from .bounds import MAX_RECORD_BYTES, check_positive
from .cache import cached
from .checksums import SEEN, read_sealed, write_sealed
from .corpus import BadRecord
from .examples import Arrays, Skipped
from .files import BadRecordError, each_here, file_marks, find_files, fingerprint, unreadable
from .mapped import map_file
from .table_files import Block, read_blocks

FORMAT_VERSION = 1
_PATTERNS = ("**/*.csv", "**/*.csv.gz", "**/*.tsv", "**/*.tsv.gz", "**/*.parquet", "**/*.npz")
_LARGEST_ID = 2**31 - 1
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


class Row(NamedTuple):
    """The values of one row, by leaf."""

    numeric: list[float]
    categorical: list[int]
    label: float | int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table(Validated):
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
        max_record_bytes: A row of more characters is an error, as is a value of more bytes in Parquet.
    """

    paths: tuple[str, ...]
    numeric: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    label: str | None = None
    label_type: Literal["float32", "int32"] = "float32"
    missing: float | int | None = None
    hash_buckets: int | None = None
    max_record_bytes: int = MAX_RECORD_BYTES

    def __post_init__(self) -> None:
        check_positive(self, "max_record_bytes")
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
                for block in read_blocks(path, name, self._columns(), self.max_record_bytes):
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
