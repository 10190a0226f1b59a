"""Corpora of records with named fields: JSON lines, Parquet, and Hugging Face datasets saved on disk.

A record is one document: its `text` field, or a `prompt` (without loss) followed by an `answer` (with loss).
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from panax.core.errors import DataError
from panax.core.validation import Validated
from panax.stores import is_remote
from panax.system.files import expand_user

from ..files.bounds import MAX_RECORD_BYTES, check_positive
from ..files.files import DataFile, cache_identity, find_files, fingerprint, open_each_local, read_error
from ..text.corpus import BadRecord, Document
from .columns import ARROW_ERRORS, check_buffers, read_documents, read_parquet_batches
from .fields import Fields, describe_missing_field, missing_library_error
from .ipc_sizes import check_ipc_sizes
from .json_records import JSON_PATTERNS, JSONL_PATTERNS, read_records

_PARQUET_PATTERNS = ("**/*.parquet",)
_RECORDS_AT_ONCE = 1024
_RECORDS_PER_BATCH = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jsonl(Validated):
    """Files of JSON records, in UTF-8: one object on each line (blank lines are skipped), or one array of
    objects.

    They may be compressed with gzip, bz2, xz or zstd, detected from a file's first bytes. They are read as a
    stream, with only one record in memory. A field of an object in a record is named by a path, such as
    `message.content`.

    Attributes:
        paths: Files, directories or globs, also of object stores. A directory is searched for `.jsonl`,
            `.ndjson`, either of them also compressed (`.jsonl.zst`), and compressed `.json` (`.json.gz`); if
            it has none of these, for `.json`.
        text: The field that holds the document.
        prompt: The field with the text before the answer, which carries no loss; needs `answer`.
        answer: The field with the text to learn; needs `prompt`.
        max_record_bytes: A longer line, decompressed, is a bad record; an array element with more characters
            is an error.
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
        for name, path in open_each_local(self.files()):
            for where, record in read_records(path, name, self.max_record_bytes, fields.check_present):
                yield record if isinstance(record, BadRecord) else fields.document(record, where)

    def files(self) -> list[DataFile]:
        """Return the files to read."""
        files_by_name: dict[str, DataFile] = {}
        for path in self.paths:
            try:
                each = find_files((path,), JSONL_PATTERNS)
            except DataError:
                if not expand_user(path).is_dir():
                    raise
                each = find_files((path,), JSON_PATTERNS)
            files_by_name.update((file.name, file) for file in each)
        return list(files_by_name.values()) if self.paths else find_files((), ())

    def fingerprint(self) -> str:
        return fingerprint("jsonl", self.text, self.prompt, self.answer, *cache_identity(self.files()))

    @property
    def _fields(self) -> Fields:
        return Fields(self.text, self.prompt, self.answer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parquet(Validated):
    """Parquet files, read one row group at a time. Needs pyarrow (`pip install 'panax-jax[parquet]'`).

    A field of a struct is named by a path, such as `message.content`.

    Attributes:
        paths: Files, directories (searched for `.parquet`) or globs, also of object stores.
        text: The column that holds the document.
        prompt: The column with the text before the answer, which carries no loss; needs `answer`.
        answer: The column with the text to learn; needs `prompt`.
        max_record_bytes: A larger value is a bad record; a page more than four times as large is an error.
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
        files = self.files()
        try:
            import pyarrow as arrow
        except ImportError as error:
            raise missing_library_error("pyarrow", "a Parquet corpus", "parquet") from error
        fields = self._fields
        for name, path in open_each_local(files):
            try:
                row = 0
                for batch in read_parquet_batches(
                    path,
                    name,
                    fields.names,
                    max_record_bytes=self.max_record_bytes,
                    rows=_RECORDS_AT_ONCE,
                    check=fields.check_present,
                ):
                    yield from read_documents(batch, fields, name, row, self.max_record_bytes)
                    row += batch.num_rows
            except (*ARROW_ERRORS, arrow.ArrowException) as error:
                raise read_error(name, error) from error

    def files(self) -> list[DataFile]:
        """Return the files to read."""
        return find_files(self.paths, _PARQUET_PATTERNS)

    def fingerprint(self) -> str:
        return fingerprint("parquet", self.text, self.prompt, self.answer, *cache_identity(self.files()))

    @property
    def _fields(self) -> Fields:
        return Fields(self.text, self.prompt, self.answer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceDisk(Validated):
    """A dataset that `save_to_disk` wrote. Needs datasets (`pip install 'panax-jax[datasets]'`).

    Attributes:
        path: The directory that was passed to `save_to_disk`.
        split: The split to read, if several were saved.
        text: The column that holds the document.
        prompt: The column with the text before the answer, which carries no loss; needs `answer`.
        answer: The column with the text to learn; needs `prompt`.
        max_record_bytes: A larger value is a bad record; a compressed record batch more than 32 times as
            large is an error.
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
        if not set(fields.names) <= set(dataset.column_names):
            # Fields of structs become columns named by their paths.
            dataset = dataset.flatten()
        for name in fields.names:
            if name not in dataset.column_names:
                raise DataError(str(describe_missing_field(name, dataset.column_names, self.path)))
        row = 0
        try:
            # Indices into a table are validated before the table is divided into batches.
            for table in (dataset.data.table.select(fields.names), dataset._indices and dataset._indices.table):
                for column in () if table is None else table.columns:
                    for chunk in column.chunks:
                        check_buffers(chunk)
            for table in dataset.select_columns(fields.names).with_format("arrow").iter(batch_size=_RECORDS_AT_ONCE):
                for batch in table.to_batches():
                    yield from read_documents(batch, fields, self.path, row, self.max_record_bytes)
                    row += batch.num_rows
        except DataError:
            raise
        except Exception as error:  # the library raises the Arrow reader's errors
            raise read_error(self.path, error) from error

    def fingerprint(self) -> str:
        files = find_files((self.path,), ("**/*.json", "**/*.arrow"))
        return fingerprint("hugging_face", self.split, self.text, self.prompt, self.answer, *cache_identity(files))

    @property
    def _fields(self) -> Fields:
        return Fields(self.text, self.prompt, self.answer)

    def _load(self) -> Any:
        if is_remote(self.path):
            raise DataError(f"{self.path}: a dataset that was saved to disk is read from a disk; copy it there")
        path = expand_user(self.path)
        if not path.is_dir():
            raise DataError(f"{self.path} is not a directory; expected one written by `Dataset.save_to_disk`")
        try:
            import datasets
        except ImportError as error:
            raise missing_library_error("datasets", "a Hugging Face dataset", "datasets") from error
        for file in sorted(path.glob("**/*.arrow")):
            max_bytes, setting = _RECORDS_PER_BATCH * self.max_record_bytes, f"{_RECORDS_PER_BATCH} * max_record_bytes"
            check_ipc_sizes(file, str(file), max_bytes, setting)
        try:
            loaded = datasets.load_from_disk(str(path))
        except Exception as error:  # the library raises the errors of the Arrow reader or of its JSON reader
            message = f"{self.path} can't be loaded: {error}; expected files written by `Dataset.save_to_disk`"
            raise DataError(message) from error
        if not isinstance(loaded, datasets.DatasetDict):
            if self.split is not None:
                raise DataError(f"split={self.split!r}, but {self.path} was saved without splits; remove split")
            return loaded
        split = next(iter(loaded)) if self.split is None and len(loaded) == 1 else self.split
        if split not in loaded:
            raise DataError(
                f"{self.path} has the splits {', '.join(map(str, loaded))}, not {split!r}; choose one with split="
            )
        return loaded[split]
