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

from panax.core.errors import DataError, RecipeError

from .corpus import Document
from .files import decode_utf8, file_marks, find_files, fingerprint, unreadable

_JSONL_PATTERNS = ("**/*.jsonl", "**/*.jsonl.gz", "**/*.ndjson", "**/*.ndjson.gz")
_PARQUET_PATTERNS = ("**/*.parquet",)
_RECORDS_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jsonl:
    """Files with one JSON object on each line (UTF-8; `.gz` files are decompressed). Blank lines are skipped.

    Attributes:
        paths: Files, directories (searched for `.jsonl` and `.ndjson`, also compressed) or globs.
        text: The field that holds the document.
        prompt: The field that holds what comes before the answer and carries no loss; needs `answer`.
        answer: The field that holds what is learnt; needs `prompt`.
    """

    paths: tuple[str, ...]
    text: str = "text"
    prompt: str | None = None
    answer: str | None = None

    def __post_init__(self) -> None:
        _check_fields(self.text, self.prompt, self.answer)

    def documents(self) -> Iterator[Document]:
        for path in find_files(self.paths, _JSONL_PATTERNS):
            for where, line in _read_lines(path):
                record = _parse(line, where)
                yield _read_record(record, text=self.text, prompt=self.prompt, answer=self.answer, where=where)

    def fingerprint(self) -> str:
        files = find_files(self.paths, _JSONL_PATTERNS)
        return fingerprint("jsonl", self.text, self.prompt, self.answer, *file_marks(files))


def _read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line that is not blank, and its name for errors."""
    offset = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path}, line {number}"
                text = decode_utf8(line, where, start=offset)
                offset += len(line)
                if text.strip():
                    yield where, text.rstrip("\r\n")  # so that an error's column is on this line
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from error


def _parse(line: str, where: str) -> dict:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            f"{where}: broken JSON ({what}); expected one whole JSON object on the line: repair it"
        ) from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}; expected an object with named fields on each line")
    return record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parquet:
    """Parquet files, read one row group at a time. Needs pyarrow (`pip install 'panax[parquet]'`).

    Attributes:
        paths: Files, directories (searched for `.parquet`) or globs.
        text: The column that holds the document.
        prompt: The column that holds what comes before the answer and carries no loss; needs `answer`.
        answer: The column that holds what is learnt; needs `prompt`.
    """

    paths: tuple[str, ...]
    text: str = "text"
    prompt: str | None = None
    answer: str | None = None

    def __post_init__(self) -> None:
        _check_fields(self.text, self.prompt, self.answer)

    def documents(self) -> Iterator[Document]:
        files = find_files(self.paths, _PARQUET_PATTERNS)
        try:
            import pyarrow as arrow
            from pyarrow import parquet
        except ImportError as error:
            raise _not_installed("pyarrow", "a Parquet corpus", "parquet") from error
        columns = _columns(self.text, self.prompt, self.answer)
        for path in files:
            try:
                with parquet.ParquetFile(path) as file:
                    present = file.schema_arrow.names
                    for name in columns:
                        if name not in present:
                            raise _missing_field(name, present, str(path))
                    row = 0
                    for batch in file.iter_batches(batch_size=_RECORDS_AT_ONCE, columns=columns):
                        for record in batch.to_pylist():
                            where = f"{path}, row {row}"
                            yield _read_record(
                                record, text=self.text, prompt=self.prompt, answer=self.answer, where=where
                            )
                            row += 1
            except (OSError, arrow.ArrowException) as error:
                raise unreadable(path, error) from error

    def fingerprint(self) -> str:
        files = find_files(self.paths, _PARQUET_PATTERNS)
        return fingerprint("parquet", self.text, self.prompt, self.answer, *file_marks(files))


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceDisk:
    """A dataset that `save_to_disk` wrote. Needs datasets (`pip install 'panax[datasets]'`).

    Attributes:
        path: The directory that was given to `save_to_disk`.
        split: Which split to take, when it was saved with several.
        text: The column that holds the document.
        prompt: The column that holds what comes before the answer and carries no loss; needs `answer`.
        answer: The column that holds what is learnt; needs `prompt`.
    """

    path: str
    split: str | None = None
    text: str = "text"
    prompt: str | None = None
    answer: str | None = None

    def __post_init__(self) -> None:
        _check_fields(self.text, self.prompt, self.answer)

    def documents(self) -> Iterator[Document]:
        dataset = self._load()
        columns = _columns(self.text, self.prompt, self.answer)
        for name in columns:
            if name not in dataset.column_names:
                raise _missing_field(name, list(dataset.column_names), self.path)
        row = 0
        for batch in dataset.select_columns(columns).with_format(None).iter(batch_size=_RECORDS_AT_ONCE):
            for values in zip(*(batch[name] for name in columns), strict=True):
                record = dict(zip(columns, values, strict=True))
                where = f"{self.path}, row {row}"
                yield _read_record(record, text=self.text, prompt=self.prompt, answer=self.answer, where=where)
                row += 1

    def fingerprint(self) -> str:
        files = find_files((self.path,), ("**/*.json", "**/*.arrow"))
        return fingerprint("hugging_face", self.split, self.text, self.prompt, self.answer, *file_marks(files))

    def _load(self) -> Any:
        path = Path(self.path).expanduser()
        if not path.is_dir():
            raise DataError(f"{self.path} is not a directory; expected what `Dataset.save_to_disk` wrote")
        try:
            import datasets
        except ImportError as error:
            raise _not_installed("datasets", "a Hugging Face dataset", "datasets") from error
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


def _read_record(record: dict, *, text: str, prompt: str | None, answer: str | None, where: str) -> Document:
    """Make a document of one record of a structured file.

    A field that is null counts as blank.

    Raises:
        DataError: A field is missing or is not a text; the message names the record and the fields it has.
    """
    if prompt is None or answer is None:
        return Document(_field(record, text, where))
    return Document(_field(record, answer, where), prompt=_field(record, prompt, where))


def _field(record: dict, name: str, where: str) -> str:
    if name not in record:
        raise _missing_field(name, list(record), where)
    value = record[name]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"{where}: field {name!r} is of type {type(value).__name__}; expected a text: name another field"
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(value[error.start]):04x}"
            raise DataError(f"{where}: field {name!r} holds {half}, half of a character; repair the text") from None
    return value


def _missing_field(name: str, present: list[str], where: str) -> DataError:
    """What to raise when a record, or a whole table, lacks a field."""
    known = ", ".join(map(repr, present)) or "none at all"
    return DataError(f"{where}: no field {name!r}; it has {known}: name the field with text=, or prompt= and answer=")


def _check_fields(text: str, prompt: str | None, answer: str | None) -> None:
    """Refuse one of `prompt` and `answer` without the other, and a `text` that would then have no effect.

    Raises:
        RecipeError: The choice is not clear.
    """
    if (prompt is None) != (answer is None):
        given, other = ("prompt", "answer") if answer is None else ("answer", "prompt")
        raise RecipeError(f"{given}= is given without {other}=; give both, or only text=")
    if prompt is not None and text != "text":
        raise RecipeError(f"text={text!r} has no effect beside prompt= and answer=; give either")


def _columns(text: str, prompt: str | None, answer: str | None) -> list[str]:
    return [text] if prompt is None or answer is None else [prompt, answer]


def _not_installed(package: str, what: str, extra: str) -> DataError:
    return DataError(f"{what} needs {package}, which can't be imported; run: pip install 'panax[{extra}]'")
