"""Criteo's click logs: tab-separated lines of a label, 13 integers and 26 hexadecimal hashes, each of them
optional.

Arrow and NumPy parse them a block at a time: a line never becomes a Python object, unless its block has an
error.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from panax.core.errors import DataError, RecipeError
from panax.core.former_names import with_former_names
from panax.core.validation import Validated

from ..files.cache import read_or_build
from ..files.checksums import VERIFIED_FOLDER, read_sealed, write_sealed
from ..files.files import cache_identity, find_files, fingerprint, open_each_local, read_error, stat_files
from ..files.magic import detect_compression
from ..files.memory_map import map_file
from ..files.skipped_files import describe_skipped_files
from ..formats.columns import ARROW_ERRORS
from ..formats.fields import missing_library_error
from ..loading.examples import Arrays, BadRecordLog, describe_skipped_records
from ..text.corpus import BadRecord
from .bags import LARGEST_ID, CountVocabulary, HashBuckets

FORMAT_VERSION = 2
INTEGERS, HASHES = 13, 26
LEAVES = tuple(f"c{number}" for number in range(1, HASHES + 1))
"""Names of the batch's categorical leaves."""

_PATTERNS = ("**/*.txt", "**/*.tsv", "**/day_*", "**/*.gz", "**/*.zst")
_BLOCK_BYTES = 2**23
_MISSING = 2**32
"""Code of an empty category, one past the largest hash: treated as a value like any other."""

_DIGITS = np.full(256, 255, np.uint8)
_DIGITS[np.frombuffer(b"0123456789", np.uint8)] = np.arange(10)
_DIGITS[np.frombuffer(b"abcdef", np.uint8)] = _DIGITS[np.frombuffer(b"ABCDEF", np.uint8)] = np.arange(10, 16)

Codes = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Criteo(Validated):
    """Click logs in the files that Criteo publishes, `train.txt` or `day_0` to `day_23`, also compressed
    (gzip, bz2, zstd). Needs pyarrow.

    A batch has `label` and `numeric`, float32 (batch, 13), 0 for a missing value, and `c1` to `c26`, int32
    (batch, 1).

    Attributes:
        paths: Files, directories or globs, also of object stores.
        ids: Mapping from hashes to ids, for all columns or for each; a missing hash is a separate value.
    """

    paths: tuple[str, ...]
    ids: HashBuckets | CountVocabulary | tuple[HashBuckets | CountVocabulary, ...] = HashBuckets(buckets=2**18)  # noqa: RUF009

    def __post_init__(self) -> None:
        if isinstance(self.ids, tuple) and len(self.ids) != HASHES:
            raise RecipeError(f"ids has {len(self.ids)} entries; expected one for all columns, or {HASHES}")

    def open(self, root: Path, max_bad_records: int) -> Arrays:
        """Open the arrays; build them first if they do not exist.

        Raises:
            DataError: A file can't be read, there is no usable line, or too many bad ones.
        """
        files = find_files(self.paths, _PATTERNS)
        kind = f"criteo-v{FORMAT_VERSION}"
        counted = [file for paths in self._counted_in() if paths for file in find_files(paths, _PATTERNS)]
        name = (
            f"{kind}-{fingerprint('criteo', with_former_names(repr(self._each)), *cache_identity([*files, *counted]))}"
        )
        content = (
            f"{kind}-{fingerprint('criteo', with_former_names(repr(self._each)), *stat_files([*files, *counted]))}"
        )
        skipped = BadRecordLog(max_bad_records)
        arrays, bad, num_ids, id_sets = read_or_build(
            root,
            name,
            build=lambda directory: self._build(files, directory, skipped),
            read=lambda directory: _read(directory, root / VERIFIED_FOLDER),
        )
        BadRecordLog(max_bad_records).begin(bad)
        notes = [*describe_skipped_files(self.paths, files), *describe_skipped_records(bad)]
        return Arrays(arrays, content=content, num_ids=num_ids, id_sets=id_sets, notes=notes)

    @property
    def _each(self) -> tuple[HashBuckets | CountVocabulary, ...]:
        return self.ids if isinstance(self.ids, tuple) else (self.ids,) * HASHES

    def _counted_in(self) -> list[tuple[str, ...]]:
        """Return the sets of files that vocabularies are counted in, each once; () stands for the data files
        themselves."""
        return list(dict.fromkeys(kind.counted_in for kind in self._each if isinstance(kind, CountVocabulary)))

    def _build(self, files: list[Any], directory: Path, skipped: BadRecordLog) -> None:
        columns = [_Ids(kind, column) for column, kind in enumerate(self._each)]
        for paths in self._counted_in():
            # Bad rows are counted in the second pass.
            for block in _blocks(
                find_files(paths, _PATTERNS) if paths else files, BadRecordLog(LARGEST_ID, quiet=True)
            ):
                for column, codes in zip(columns, block.codes, strict=True):
                    if isinstance(column.kind, CountVocabulary) and column.kind.counted_in == paths:
                        column.count(codes)
        for column in columns:
            column.choose()
        count = 0
        names = ("label", "numeric", "categories")
        outputs: dict[str, BinaryIO] = {name: (directory / f"{name}.bin").open("wb") for name in names}
        try:
            for block in _blocks(files, skipped):
                ids = np.stack([column.of(codes) for column, codes in zip(columns, block.codes, strict=True)], axis=1)
                for name, values in zip(names, (block.label, block.numeric, ids), strict=True):
                    outputs[name].write(np.ascontiguousarray(values).tobytes())
                count += len(ids)
        finally:
            for file in outputs.values():
                file.close()
        if not count:
            raise DataError(
                f"{', '.join(self.paths)} has no usable line; expected Criteo's format, {_FIELDS} fields a line"
            )
        header = {
            "num_rows": count,
            "bad_records": skipped.bad,
            "num_ids": {leaf: column.num_ids for leaf, column in zip(LEAVES, columns, strict=True)},
            "id_sets": {
                leaf: column.id_set
                for leaf, column in zip(LEAVES, columns, strict=True)
                if isinstance(column.kind, CountVocabulary)
            },
        }
        write_sealed(directory / "header.json", header, [f"{name}.bin" for name in names])


_FIELDS = 1 + INTEGERS + HASHES


class _Block(NamedTuple):
    """Usable lines of a block.

    Attributes:
        codes: Hashes of each categorical column; `_MISSING` for an empty value.
    """

    label: npt.NDArray[np.float32]
    numeric: npt.NDArray[np.float32]
    codes: list[Codes]


class _Ids:
    """Mapping from a column's codes to its ids."""

    def __init__(self, kind: HashBuckets | CountVocabulary, column: int) -> None:
        self.kind, self._salt = kind, np.uint64(column + 1)
        self._counted = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self._words = self._counted[0], np.zeros(0, np.int32)

    @property
    def num_ids(self) -> int:
        kind = self.kind
        return kind.buckets if isinstance(kind, HashBuckets) else len(self._words[0]) + kind.hash_buckets

    @property
    def id_set(self) -> str:
        """Return a hash of the mapping from ids to values."""
        words, ids = self._words
        return fingerprint(words[np.argsort(ids)].tolist())

    def count(self, codes: Codes) -> None:
        if isinstance(self.kind, HashBuckets):
            return
        new, counts = np.unique(codes, return_counts=True)
        words, inverse = np.unique(np.concatenate([self._counted[0], new]), return_inverse=True)
        totals = np.zeros(len(words), np.int64)
        np.add.at(totals, inverse, np.concatenate([self._counted[1], counts]))
        self._counted = words, totals

    def choose(self) -> None:
        """Assign ids to the counted values: by count, then by hash."""
        if isinstance(self.kind, HashBuckets):
            return
        words, counts = self._counted
        order = np.lexsort((words, -counts))
        order = order[counts[order] >= self.kind.min_count][: self.kind.most]
        by_word = np.argsort(words[order])
        self._words = words[order][by_word], by_word.astype(np.int32)

    def of(self, codes: Codes) -> npt.NDArray[np.int32]:
        kind = self.kind
        if isinstance(kind, HashBuckets):
            return (_mix(codes, self._salt) % np.uint64(kind.buckets)).astype(np.int32)
        words, ids = self._words
        shared = (_mix(codes, self._salt) % np.uint64(kind.hash_buckets)).astype(np.int32) + len(words)
        if not len(words):
            return shared
        at = np.minimum(np.searchsorted(words, codes), len(words) - 1)
        return np.where(words[at] == codes, ids[at], shared).astype(np.int32)


def _mix(codes: Codes, salt: np.uint64) -> Codes:
    """Apply SplitMix64's mix, so that no bits of Criteo's hashes are favored, and columns are independent."""
    with np.errstate(over="ignore"):
        x = codes + salt * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _blocks(files: list[Any], skipped: BadRecordLog) -> Iterator[_Block]:
    try:
        import pyarrow as arrow
        from pyarrow import csv
    except ImportError as error:
        raise missing_library_error("pyarrow", "Criteo's files", "parquet") from error
    names = ["label", *(f"i{n}" for n in range(1, INTEGERS + 1)), *LEAVES]
    for name, path in open_each_local(files):
        lines = _Lines(name)
        try:
            if not path.stat().st_size:
                continue
            with path.open("rb") as file:
                compression = detect_compression(file.read(8))
            with arrow.input_stream(str(path), compression=compression) as stream:
                reader = csv.open_csv(
                    stream,
                    # One thread: lines are numbered only then.
                    read_options=csv.ReadOptions(column_names=names, block_size=_BLOCK_BYTES, use_threads=False),
                    parse_options=csv.ParseOptions(
                        delimiter="\t", quote_char=False, invalid_row_handler=lines.invalid, ignore_empty_lines=False
                    ),
                    convert_options=csv.ConvertOptions(
                        column_types=dict.fromkeys(names, arrow.binary()), strings_can_be_null=False
                    ),
                )
                for batch in reader:
                    yield _parse_block(batch, lines, skipped)
                lines.report(skipped, [])
        except (*ARROW_ERRORS, arrow.ArrowException) as error:
            if isinstance(error, DataError):
                raise
            raise read_error(name, error) from error


class _Lines:
    """Line numbers of parsed rows in their file."""

    def __init__(self, name: str) -> None:
        self._name, self._next = name, 1
        self._invalid: list[tuple[int, str]] = []

    def invalid(self, row: Any) -> str:
        self._invalid.append((row.number, f"{row.actual_columns} fields; expected {row.expected_columns}"))
        return "skip"

    def report(self, skipped: BadRecordLog, invalid: list[tuple[int, str]], before: int | None = None) -> None:
        """Report bad lines and their errors, in order.

        Args:
            invalid: Bad lines that could be split into fields.
            before: Of the lines that could not be split, report only those before this line; None for all.
        """
        mine = [each for each in self._invalid if before is None or each[0] < before]
        self._invalid = self._invalid[len(mine) :]
        for number, reason in sorted(mine + invalid):
            skipped.add(BadRecord(f"{self._name}, line {number}", reason))

    def number(self, rows: int) -> npt.NDArray[np.int64]:
        """Return the line numbers of the next `rows` lines that could be split into fields."""
        wrong = {number for number, _ in self._invalid}
        if not wrong:
            found = np.arange(self._next, self._next + rows)
        else:
            every = np.arange(self._next, self._next + rows + len(wrong))
            found = every[~np.isin(every, [*wrong])][:rows]
        self._next = int(found[-1]) + 1 if rows else self._next
        return found


def _parse_block(batch: Any, lines: _Lines, skipped: BadRecordLog) -> _Block:
    """Parse a block's usable lines; report the others."""
    numbers = lines.number(batch.num_rows)
    usable = np.ones(batch.num_rows, bool)
    problems: list[tuple[int, str]] = []

    def refuse(column: int, wrong: npt.NDArray[np.bool_], expected: str) -> None:
        for row in np.flatnonzero(wrong & usable).tolist():
            value = batch.column(column)[row].as_py().decode(errors="backslashreplace")
            name = batch.schema.names[column]
            problems.append((int(numbers[row]), f"column {name!r} holds {value!r}; expected {expected}"))
        usable[wrong] = False

    integers = []
    for column in range(1 + INTEGERS):
        values, wrong = _integers(batch.column(column))
        if column == 0:
            wrong |= (values != 0) & (values != 1)
        if wrong.any():
            refuse(column, wrong, "0 or 1" if column == 0 else "a whole number, or nothing")
        integers.append(values)
    codes = []
    for column in range(1 + INTEGERS, _FIELDS):
        values, wrong = _hashes(batch.column(column))
        if wrong.any():
            refuse(column, wrong, "up to 8 hexadecimal digits, or nothing")
        codes.append(values)
    lines.report(skipped, problems, int(numbers[-1]) + 1 if len(numbers) else None)
    numeric = np.stack(integers[1:], axis=1).astype(np.float32)
    all_usable = usable.all()
    return _Block(
        integers[0].astype(np.float32) if all_usable else integers[0][usable].astype(np.float32),
        numeric if all_usable else numeric[usable],
        codes if all_usable else [values[usable] for values in codes],
    )


def _buffers(column: Any) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Return a column's offsets and bytes."""
    _, offsets, data = column.buffers()
    starts = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return starts, np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)


def _integers(column: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Parse whole numbers, 0 for an empty field; return a mask of the invalid ones, too."""
    starts, data = _buffers(column)
    lengths = np.diff(starts)
    values = np.zeros(len(column), np.int64)
    if not len(data):
        return values, np.zeros(len(column), bool)
    negative = (lengths > 0) & (data[np.minimum(starts[:-1], len(data) - 1)] == ord("-"))
    wrong = (lengths > 18) | (negative & (lengths == 1))
    for place in range(min(18, int(lengths.max(initial=0)))):
        there = lengths > place
        byte = data[np.minimum(starts[:-1] + place, len(data) - 1)]
        digit = byte - np.uint8(ord("0"))
        sign = negative & (place == 0)
        wrong |= there & ~sign & (digit > 9)
        values = np.where(there & ~sign, values * 10 + digit, values)
    return np.where(negative, -values, values), wrong


def _hashes(column: Any) -> tuple[Codes, npt.NDArray[np.bool_]]:
    """Parse hexadecimal hashes, `_MISSING` for an empty field; return a mask of the invalid ones, too."""
    starts, data = _buffers(column)
    lengths = np.diff(starts)
    values = np.zeros(len(column), np.uint64)
    wrong = lengths > 8
    if len(data):
        full = lengths == 8
        # Nearly all have 8 digits: these are gathered as one matrix.
        for length in np.unique(lengths[~wrong]).tolist():
            rows = np.flatnonzero(full) if length == 8 else np.flatnonzero(lengths == length)
            hashes = np.zeros(len(rows), np.uint64)
            begin = starts[:-1][rows]
            for place in range(length):
                digit = _DIGITS[data[begin + place]]
                wrong[rows] |= digit > 15
                hashes = hashes * np.uint64(16) + digit
            values[rows] = hashes
    values[lengths == 0] = _MISSING
    return values, wrong


def _read(
    directory: Path, verified_dir: Path
) -> tuple[dict[str, np.ndarray], list[BadRecord], Mapping[str, int], Mapping[str, str]]:
    path = directory / "header.json"
    header = read_sealed(path, verified_dir)
    try:
        count = int(header["num_rows"])
        bad = [BadRecord(str(where), str(reason)) for where, reason in header["bad_records"]]
        num_ids = {leaf: int(header["num_ids"][leaf]) for leaf in LEAVES}
        id_sets = {str(leaf): str(name) for leaf, name in header["id_sets"].items()}
    except (ValueError, KeyError, TypeError) as error:
        raise read_error(path, error) from error
    remedy = "remove its folder, and it is made again"
    ids = map_file(directory / "categories.bin", np.dtype("<i4"), (count, HASHES), remedy)
    arrays: dict[str, np.ndarray] = {
        "label": map_file(directory / "label.bin", np.dtype("<f4"), (count,), remedy),
        "numeric": map_file(directory / "numeric.bin", np.dtype("<f4"), (count, INTEGERS), remedy),
    }
    return arrays | {leaf: ids[:, at : at + 1] for at, leaf in enumerate(LEAVES)}, bad, num_ids, id_sets
