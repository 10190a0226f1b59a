"""Corpora of records with named fields: JSON lines, Parquet, and Hugging Face datasets saved on disk.

A record is one document: its `text` field, or a `prompt` (without loss) followed by an `answer` (with loss).
"""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from panax.core.errors import DataError
from panax.core.validated import Validated
from panax.stores import is_remote

from .bounds import MAX_RECORD_BYTES, check_positive, too_large
from .columns import ARROW_ERRORS, check_values, documents_of, parquet_batches
from .corpus import BadRecord, Document
from .fields import Fields, not_installed
from .files import BadRecordError, decode_utf8, each_here, file_marks, find_files, fingerprint, unreadable
from .ipc_sizes import check_ipc_sizes

_JSONL_PATTERNS = ("**/*.jsonl", "**/*.jsonl.gz", "**/*.ndjson", "**/*.ndjson.gz")
_PARQUET_PATTERNS = ("**/*.parquet",)
_RECORDS_AT_ONCE = 1024
_SKIP_BYTES = 2**20
_RECORDS_PER_BATCH = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jsonl(Validated):
    """Files with one JSON object on each line (UTF-8; `.gz` files are decompressed). Blank lines are skipped.

    Attributes:
        paths: Files, directories (searched for `.jsonl` and `.ndjson`, also compressed) or globs, also of object stores.
        text: The field that holds the document.
        prompt: The field that holds what comes before the answer and carries no loss; needs `answer`.
        answer: The field that holds what is learnt; needs `prompt`.
        max_record_bytes: A line of more, decompressed, is a bad record.
    """

    paths: tuple[str, ...]
    text: str = "text"
    prompt: str | None = None
    answer: str | None = None
    max_record_bytes: int = MAX_RECORD_BYTES

    def __post_init__(self) -> None:
        self._fields.check()
        check_positive(self, "max_record_bytes")

    def documents(self) -> Iterator[Document | BadRecord]:
        fields = self._fields
        for name, path in each_here(find_files(self.paths, _JSONL_PATTERNS)):
            for where, line in _read_lines(path, name, self.max_record_bytes):
                if isinstance(line, BadRecord):
                    yield line
                    continue
                try:
                    yield fields.document(parse_object(line, where), where)
                except BadRecordError as error:
                    yield BadRecord(error.where, error.reason)

    def fingerprint(self) -> str:
        files = find_files(self.paths, _JSONL_PATTERNS)
        return fingerprint("jsonl", self.text, self.prompt, self.answer, *file_marks(files))

    @property
    def _fields(self) -> Fields:
        return Fields(self.text, self.prompt, self.answer)


def _read_lines(path: Path, name: str, most: int) -> Iterator[tuple[str, str | BadRecord]]:
    """Yield the place of each line that is not blank, and the line, or what is wrong with its size or its encoding."""
    offset = number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            while line := lines.readline(most + 1):
                number += 1
                where, start = f"{name}, line {number}", offset
                offset += len(line)
                if len(line) > most and not line.endswith(b"\n"):
                    offset += _skip_line(lines)
                    yield where, BadRecord(where, too_large(offset - start, most))
                    continue
                try:
                    text = decode_utf8(line, where, start=start)
                except BadRecordError as error:
                    yield where, BadRecord(error.where, error.reason)
                    continue
                if text.strip():
                    yield where, text.rstrip("\r\n")  # so that an error's column is on this line
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(name, error) from error


def _skip_line(lines: Any) -> int:
    """Read to the end of the line; how many bytes those were."""
    skipped = 0
    while part := lines.readline(_SKIP_BYTES):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def parse_object(line: str, where: str) -> dict:
    """A JSON object.

    Raises:
        BadRecordError: It is none.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise BadRecordError(
            where, f"broken JSON ({what}); expected one whole JSON object on the line: repair it"
        ) from None
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise BadRecordError(where, f"a JSON {kind}; expected an object with named fields on each line")
    return record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parquet(Validated):
    """Parquet files, read one row group at a time. Needs pyarrow (`pip install 'panax-jax[parquet]'`).

    Attributes:
        paths: Files, directories (searched for `.parquet`) or globs, also of object stores.
        text: The column that holds the document.
        prompt: The column that holds what comes before the answer and carries no loss; needs `answer`.
        answer: The column that holds what is learnt; needs `prompt`.
        max_record_bytes: A value of more is a bad record; a page of more than four times as much is an error.
    """

    paths: tuple[str, ...]
    text: str = "text"
    prompt: str | None = None
    answer: str | None = None
    max_record_bytes: int = MAX_RECORD_BYTES

    def __post_init__(self) -> None:
        self._fields.check()
        check_positive(self, "max_record_bytes")

    def documents(self) -> Iterator[Document | BadRecord]:
        files = find_files(self.paths, _PARQUET_PATTERNS)
        try:
            import pyarrow as arrow
        except ImportError as error:
            raise not_installed("pyarrow", "a Parquet corpus", "parquet") from error
        fields = self._fields
        for name, path in each_here(files):
            try:
                row = 0
                for batch in parquet_batches(
                    path,
                    name,
                    fields.names,
                    most=self.max_record_bytes,
                    rows=_RECORDS_AT_ONCE,
                    check=fields.check_present,
                ):
                    yield from documents_of(batch, fields, name, row, self.max_record_bytes)
                    row += batch.num_rows
            except (*ARROW_ERRORS, arrow.ArrowException) as error:
                raise unreadable(name, error) from error

    def fingerprint(self) -> str:
        files = find_files(self.paths, _PARQUET_PATTERNS)
        return fingerprint("parquet", self.text, self.prompt, self.answer, *file_marks(files))

    @property
    def _fields(self) -> Fields:
        return Fields(self.text, self.prompt, self.answer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceDisk(Validated):
    """A dataset that `save_to_disk` wrote. Needs datasets (`pip install 'panax-jax[datasets]'`).

    Attributes:
        path: The directory that was given to `save_to_disk`.
        split: Which split to take, when it was saved with several.
        text: The column that holds the document.
        prompt: The column that holds what comes before the answer and carries no loss; needs `answer`.
        answer: The column that holds what is learnt; needs `prompt`.
        max_record_bytes: A value of more is a bad record; a compressed record batch of more than 32 times as much is an error.
    """

    path: str
    split: str | None = None
    text: str = "text"
    prompt: str | None = None
    answer: str | None = None
    max_record_bytes: int = MAX_RECORD_BYTES

    def __post_init__(self) -> None:
        self._fields.check()
        check_positive(self, "max_record_bytes")

    def documents(self) -> Iterator[Document | BadRecord]:
        dataset = self._load()
        fields = self._fields
        fields.check_present(dataset.column_names, self.path)
        row = 0
        try:
            # What indexes into a table must hold before the table is cut into batches.
            for table in (dataset.data.table.select(fields.names), dataset._indices and dataset._indices.table):
                for column in () if table is None else table.columns:
                    for chunk in column.chunks:
                        check_values(chunk)
            for table in dataset.select_columns(fields.names).with_format("arrow").iter(batch_size=_RECORDS_AT_ONCE):
                for batch in table.to_batches():
                    yield from documents_of(batch, fields, self.path, row, self.max_record_bytes)
                    row += batch.num_rows
        except DataError:
            raise
        except Exception as error:  # the library raises whatever the Arrow reader did
            raise unreadable(self.path, error) from error

    def fingerprint(self) -> str:
        files = find_files((self.path,), ("**/*.json", "**/*.arrow"))
        return fingerprint("hugging_face", self.split, self.text, self.prompt, self.answer, *file_marks(files))

    @property
    def _fields(self) -> Fields:
        return Fields(self.text, self.prompt, self.answer)

    def _load(self) -> Any:
        if is_remote(self.path):
            raise DataError(f"{self.path}: a dataset that was saved to disk is read from a disk; copy it there")
        path = Path(self.path).expanduser()
        if not path.is_dir():
            raise DataError(f"{self.path} is not a directory; expected what `Dataset.save_to_disk` wrote")
        try:
            import datasets
        except ImportError as error:
            raise not_installed("datasets", "a Hugging Face dataset", "datasets") from error
        for file in sorted(path.glob("**/*.arrow")):
            most, setting = _RECORDS_PER_BATCH * self.max_record_bytes, f"{_RECORDS_PER_BATCH} * max_record_bytes"
            check_ipc_sizes(file, str(file), most, setting)
        try:
            loaded = datasets.load_from_disk(str(path))
        except Exception as error:  # the library raises whatever the Arrow reader or its JSON reader did
            message = f"{self.path} can't be loaded: {error}; expected what `Dataset.save_to_disk` wrote"
            raise DataError(message) from error
        if not isinstance(loaded, datasets.DatasetDict):
            if self.split is not None:
                raise DataError(f"split={self.split!r}, but {self.path} was saved without splits; leave split out")
            return loaded
        split = next(iter(loaded)) if self.split is None and len(loaded) == 1 else self.split
        if split not in loaded:
            raise DataError(
                f"{self.path} has the splits {', '.join(map(str, loaded))}, not {split!r}; choose one with split="
            )
        return loaded[split]
