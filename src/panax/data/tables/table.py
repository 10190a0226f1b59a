"""Tables as examples: numeric and categorical columns of CSV, Parquet or NumPy files, for recommenders and
the like.

A table is read once, into cached arrays that are memory-mapped from then on.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from panax.core.errors import DataError, RecipeError
from panax.core.former_names import with_former_names
from panax.core.validation import Validated

from ..files.bounds import MAX_RECORD_BYTES, check_positive
from ..files.cache import read_or_build
from ..files.checksums import VERIFIED_FOLDER, read_sealed, write_sealed
from ..files.decompression import SUFFIXES
from ..files.files import (
    BadRecordError,
    cache_identity,
    find_files,
    fingerprint,
    open_each_local,
    read_error,
    stat_files,
)
from ..files.memory_map import map_file
from ..files.skipped_files import describe_skipped_files
from ..loading.examples import Arrays, BadRecordLog, describe_skipped_records
from ..text.corpus import BadRecord
from .bags import (
    LARGEST_ID,
    Bag,
    CountVocabulary,
    HashedIds,
    IdEncoder,
    build_vocabulary,
    check_bags,
    count_values,
    hash_value,
    log_frequencies,
    parse_seconds,
    read_vocabularies,
    write_vocabularies,
)
from .categories import NumberFormats, category_text, is_empty, parse_id, parse_number
from .table_files import RowBlock, read_blocks

FORMAT_VERSION = 2
TABLE_PATTERNS = (
    *(f"**/*{kind}{end}" for kind in (".csv", ".tsv", ".CSV", ".TSV") for end in ("", *SUFFIXES, ".zip")),
    "**/*.inter", "**/*.parquet", "**/*.npz",
)  # fmt: skip
_TIME = "_time"
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


class TableRow(NamedTuple):
    """The values of one row, by leaf.

    Attributes:
        bags: The ids of each bag, and their weights.
        time: Seconds, for a split by time; not a leaf of a batch.
    """

    numeric: list[float]
    categorical: list[int]
    label: float | int | None
    bags: list[tuple[list[int], list[float]]]
    time: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table(Validated):
    """Rows of CSV (`.csv`, `.tsv`, also compressed: `.gz`, `.zst`, ...), Parquet or NumPy (`.npz`, one array
    per column) files.

    A batch has `numeric`, float32 (batch, column), `categorical`, int32 (batch, column), and `label` (batch),
    for the columns that are named, and a leaf for each bag. A row with a missing or invalid value is a bad
    record.

    Attributes:
        paths: Files, directories or globs, also of object stores.
        numeric: Numeric columns.
        categorical: Categorical columns: integers from 0, or any values if `hash_buckets` is set.
        bags: Categorical columns that each become a leaf with separate ids, for a recommender's embedding
            tables.
        label: The column to predict, or None.
        label_type: "float32", or "int32" for classes and counts.
        label_above: Threshold: the label is 1 if the column exceeds it, else 0. None: the column itself.
        time: A column of dates or numbers, for `ExampleData(split="time")`, or None.
        missing: Value that replaces an empty value of a numeric column. None: the row is a bad record.
        hash_buckets: Number of ids of each categorical column: a value's id is its hash modulo this; an empty
            value is hashed too. None: the values are the ids.
        max_record_bytes: A longer row (in characters), or a larger value in Parquet, is an error.
    """

    paths: tuple[str, ...]
    numeric: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    bags: tuple[Bag, ...] = ()
    label: str | None = None
    label_type: Literal["float32", "int32"] = "float32"
    label_above: float | int | None = None
    time: str | None = None
    missing: float | int | None = None
    hash_buckets: int | None = None
    max_record_bytes: int = MAX_RECORD_BYTES

    def __post_init__(self) -> None:
        check_positive(self, "max_record_bytes")
        names = [*self.numeric, *self.categorical, *(() if self.label is None else (self.label,))]
        if not (self.numeric or self.categorical or self.bags) or len(set(names)) < len(names):
            raise RecipeError(
                f"the columns {names} of a table; expected one or more, each once, in numeric=, categorical= or bags="
            )
        check_bags(self.bags, self._plain_leaves())
        if self.label_above is not None and self.label is None:
            raise RecipeError(f"label_above={self.label_above} has no effect without label=; name the column")
        if self.hash_buckets is not None and not (self.categorical and 0 < self.hash_buckets <= LARGEST_ID):
            raise RecipeError(
                f"hash_buckets={self.hash_buckets}; expected 1 to {LARGEST_ID}, with categorical= columns to hash"
            )

    def open(self, root: Path, max_bad_records: int) -> Arrays:
        """Open the cached arrays; build them first if they do not exist.

        Raises:
            DataError: A file can't be read or lacks a column, there are no rows, or too many bad ones.
        """
        files = find_files(self.paths, TABLE_PATTERNS)
        marks = [*cache_identity(files)]
        settings = (self.numeric, self.categorical, self.label, self.label_type, self.missing, self.hash_buckets)
        if self.bags or self.time is not None or self.label_above is not None:
            settings = (*settings, *map(with_former_names, map(repr, self.bags)), self.time, self.label_above)
        kind = f"table-v{FORMAT_VERSION}"
        name = f"{kind}-{fingerprint('table', *settings, *marks)}"
        # A moved copy, or a file with changed permissions, holds the same data.
        content = f"{kind}-{fingerprint('table', *settings, *stat_files(files))}"
        bad_records = BadRecordLog(max_bad_records)
        built = read_or_build(
            root,
            name,
            build=lambda directory: self._build(files, directory, bad_records, self._words(files, marks, root)),
            read=lambda directory: self._read(directory, root / VERIFIED_FOLDER),
        )
        BadRecordLog(max_bad_records).begin(built.bad)
        times = built.arrays.pop(_TIME, None)
        notes = [*describe_skipped_files(self.paths, files), *built.notes, *describe_skipped_records(built.bad)]
        return Arrays(
            built.arrays, content=content, times=times, num_ids=built.num_ids, id_sets=built.id_sets, notes=notes
        )

    def _columns(self) -> list[str]:
        """List the columns to read, without duplicates."""
        of_bags = (column for bag in self.bags for column in bag.columns)
        rest = (name for name in (self.label, self.time) if name is not None)
        return list(dict.fromkeys([*self.numeric, *self.categorical, *of_bags, *rest]))

    def _plain_leaves(self) -> list[str]:
        wanted = {"numeric": self.numeric, "categorical": self.categorical, "label": self.label is not None}
        return [leaf for leaf, is_there in wanted.items() if is_there]

    def _words(self, files: list[Any], marks: list[Any], root: Path) -> dict[str, dict[str, int]]:
        """Return the vocabulary (value to id) of each bag that has one; count it in the files if it is not
        cached.
        """
        words: dict[str, dict[str, int]] = {}
        of_files: dict[tuple[str, ...], list[Bag]] = {}
        for bag in self.bags:
            if isinstance(bag.ids, CountVocabulary):
                of_files.setdefault(bag.ids.counted_in, []).append(bag)
        for paths, bags in of_files.items():
            counted = find_files(paths, TABLE_PATTERNS) if paths else files
            words |= self._counted_words(bags, counted, [*cache_identity(counted)] if paths else marks, root)
        return words

    def _counted_words(
        self, bags: list[Bag], files: list[Any], marks: list[Any], root: Path
    ) -> dict[str, dict[str, int]]:
        def build(directory: Path) -> None:
            counts: dict[str, Counter[str]] = {bag.name: Counter() for bag in bags}
            columns = list(dict.fromkeys(bag.column for bag in bags))
            for name, path in open_each_local(files):
                for block in read_blocks(path, name, columns, self.max_record_bytes, lists=True):
                    for bag in bags:
                        count_values(bag, block.columns[bag.column], counts[bag.name])
            kinds = {bag.name: bag.ids for bag in bags if isinstance(bag.ids, CountVocabulary)}
            write_vocabularies(directory, {leaf: build_vocabulary(counts[leaf], kinds[leaf]) for leaf in counts})

        # The marks include the files that are counted.
        kinds = [
            dataclasses.replace(bag, ids=dataclasses.replace(bag.ids, counted_in=()))
            for bag in bags
            if isinstance(bag.ids, CountVocabulary)
        ]
        name = f"vocabulary-v{FORMAT_VERSION}-{fingerprint('vocabulary', *map(with_former_names, map(repr, kinds)), *marks)}"
        return read_or_build(root, name, build=build, read=lambda directory: read_vocabularies(directory, root))

    def _dtypes(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Return the dtype and row shape of each array."""
        label = np.dtype("<f4" if self.label_type == "float32" else "<i4")
        leaves = {
            "numeric": (np.dtype("<f4"), (len(self.numeric),)),
            "categorical": (np.dtype("<i4"), (len(self.categorical),)),
            "label": (label, ()),
        }
        dtypes = {leaf: leaves[leaf] for leaf in self._plain_leaves()}
        for bag in self.bags:
            dtypes[bag.name] = np.dtype("<i4"), (bag.capacity,)
            if isinstance(bag.ids, HashedIds):
                dtypes[bag.name] = np.dtype("<u4"), (bag.capacity, 2)
            if bag.weights:
                dtypes[f"{bag.name}_weights"] = np.dtype("<f4"), (bag.capacity,)
            if bag.log_share:
                dtypes[f"{bag.name}_log_share"] = np.dtype("<f4"), ()
        return dtypes if self.time is None else {**dtypes, _TIME: (np.dtype("<f8"), ())}

    def _build(
        self, files: list[Any], directory: Path, skipped: BadRecordLog, words: Mapping[str, Mapping[str, int]]
    ) -> None:
        count = 0
        bags = [IdEncoder(bag, words.get(bag.name)) for bag in self.bags]
        spellings = {column: NumberFormats() for column in self.categorical}
        dtypes = self._dtypes()
        derived = [bag for bag in self.bags if bag.log_share]
        written = dtypes.keys() - {f"{bag.name}_log_share" for bag in derived}
        outputs: dict[str, BinaryIO] = {leaf: (directory / f"{leaf}.bin").open("wb") for leaf in sorted(written)}
        try:
            for name, path in open_each_local(files):
                for block in read_blocks(path, name, self._columns(), self.max_record_bytes, lists=self._lists()):
                    rows = self._rows(block, skipped, bags, spellings)
                    count += len(rows)
                    for leaf, file in outputs.items():
                        dtype = dtypes[leaf][0]
                        # A 64-bit key is two words, the lower one first.
                        dtype = np.dtype("<u8") if dtype == np.dtype("<u4") else dtype
                        file.write(np.array(self._values(rows, leaf), dtype).tobytes())
        finally:
            for file in outputs.values():
                file.close()
        if not count:
            raise DataError(f"the table {', '.join(self.paths)} has no usable row; expected at least one")
        for bag in derived:
            ids = np.fromfile(directory / f"{bag.name}.bin", "<i4").reshape(count, bag.capacity)
            (directory / f"{bag.name}_log_share.bin").write_bytes(log_frequencies(ids).astype("<f4").tobytes())
        spelled = (each.note(column) for column, each in spellings.items() if self.hash_buckets is not None)
        header = {
            "num_rows": count,
            "bad_records": skipped.bad,
            "num_ids": {bag.bag.name: bag.num_ids for bag in bags},
            # For ids assigned by counts: two tables of one run must have counted the same values.
            "id_sets": {leaf: fingerprint(*vocabulary) for leaf, vocabulary in words.items()},
            "notes": [*filter(None, spelled), *(note for bag in bags for note in bag.notes())],
        }
        write_sealed(directory / "header.json", header, [f"{leaf}.bin" for leaf in dtypes])

    def _lists(self) -> bool:
        """Return True if a column of lists is allowed, which is for bags only."""
        plain = {*self.numeric, *self.categorical, self.label, self.time}
        return all(column not in plain for bag in self.bags for column in bag.columns) and bool(self.bags)

    def _values(self, rows: list[TableRow], leaf: str) -> list[Any]:
        """Collect one leaf's values of some rows."""
        if leaf in ("numeric", "categorical", "label"):
            return [getattr(row, leaf) for row in rows]
        if leaf == _TIME:
            return [row.time for row in rows]
        for place, bag in enumerate(self.bags):
            if leaf == bag.name:
                return [row.bags[place][0] for row in rows]
            if bag.weights and leaf == f"{bag.name}_weights":
                return [row.bags[place][1] for row in rows]
        raise AssertionError(leaf)

    def _rows(
        self, block: RowBlock, skipped: BadRecordLog, bags: list[IdEncoder], spellings: Mapping[str, NumberFormats]
    ) -> list[TableRow]:
        """Parse the rows of a block; bad ones are added to `skipped`."""
        for record in block.bad:
            skipped.add(record)
        names = self._columns()
        rows = []
        for where, *values in zip(block.where, *(block.columns[name] for name in names), strict=True):
            try:
                rows.append(self._row(dict(zip(names, values, strict=True)), bags, where, spellings))
            except BadRecordError as error:
                skipped.add(BadRecord(error.where, error.reason))
        return rows

    def _row(
        self, values: Mapping[str, Any], bags: list[IdEncoder], where: str, spellings: Mapping[str, NumberFormats]
    ) -> TableRow:
        return TableRow(
            [self._number(name, values[name], where) for name in self.numeric],
            [self._category(name, values[name], where, spellings) for name in self.categorical],
            None if self.label is None else self._label(values[self.label], where),
            [bag.encode(values[bag.bag.column], values.get(bag.bag.weights), where) for bag in bags],
            None if self.time is None else parse_seconds(values[self.time], self.time, where),
        )

    def _number(self, column: str, value: Any, where: str) -> float:
        if self.missing is not None and is_empty(value):
            return self.missing
        hint = "; pass missing= for empty ones" if is_empty(value) else ""
        return _finite(column, value, where, hint)

    def _category(self, column: str, value: Any, where: str, spellings: Mapping[str, NumberFormats]) -> int:
        if self.hash_buckets is None:
            return _whole(column, value, where, "; or give hash_buckets=")
        spellings[column].add(value)
        text = "" if is_empty(value) else category_text(value, column, where)
        return hash_value(column, text) % self.hash_buckets

    def _label(self, value: Any, where: str) -> float | int:
        assert self.label is not None
        if self.label_above is not None:
            return int(_finite(self.label, value, where) > self.label_above)
        return (_whole if self.label_type == "int32" else _finite)(self.label, value, where)

    def _read(self, directory: Path, verified_dir: Path) -> "_BuiltTable":
        path = directory / "header.json"
        header = read_sealed(path, verified_dir)
        try:
            count = int(header["num_rows"])
            bad = [BadRecord(str(where), str(reason)) for where, reason in header["bad_records"]]
            num_ids = {str(leaf): int(ids) for leaf, ids in header.get("num_ids", {}).items()}
            id_sets = {str(leaf): str(name) for leaf, name in header["id_sets"].items()}
            notes = [*map(str, header["notes"])]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise read_error(path, error) from error
        remedy = "remove its folder, and it is made again"
        leaves = self._dtypes().items()
        arrays = {
            leaf: map_file(directory / f"{leaf}.bin", dtype, (count, *shape), remedy) for leaf, (dtype, shape) in leaves
        }
        return _BuiltTable(arrays, bad, num_ids, id_sets, notes)


class _BuiltTable(NamedTuple):
    """The cached form of a table."""

    arrays: dict[str, np.ndarray]
    bad: list[BadRecord]
    num_ids: dict[str, int]
    id_sets: dict[str, str]
    notes: list[str]


def _finite(column: str, value: Any, where: str, hint: str = "") -> float:
    number = parse_number(value)
    if not abs(number) <= _LARGEST_FLOAT:
        raise BadRecordError(where, f"column {column!r} holds {value!r}; expected a finite number{hint}")
    return number


def _whole(column: str, value: Any, where: str, hint: str = "") -> int:
    number = parse_id(value)
    if not 0 <= number <= LARGEST_ID:
        raise BadRecordError(where, f"column {column!r} holds {value!r}; expected a whole number from 0 on{hint}")
    return number
