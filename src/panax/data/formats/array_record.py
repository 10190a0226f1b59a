"""A corpus of ArrayRecord files, the format of Grain and TensorFlow Datasets."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from panax.core.errors import DataError
from panax.core.validation import Validated

from ..files.bounds import MAX_RECORD_BYTES, check_positive, describe_oversize
from ..files.files import (
    BadRecordError,
    DataFile,
    cache_identity,
    decode_utf8,
    find_files,
    fingerprint,
    open_each_local,
    read_error,
)
from ..text.corpus import BadRecord, Document
from .fields import Fields, missing_library_error
from .json_records import parse_object
from .riegeli_sizes import safe_record_count

_PATTERNS = ("**/*.array_record", "**/*.arrayrecord", "**/*.array_record-*")
_RECORDS_AT_ONCE = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecord(Validated):
    """ArrayRecord files with records that are texts or JSON objects. Needs array_record (`pip install
    'panax-jax[arrayrecord]'`).

    Attributes:
        paths: Files, directories (searched for `.array_record`) or globs, also of object stores.
        record: Format of a record: "text", the document in UTF-8, or "json", an object with the fields below.
        text: The field that holds the document.
        prompt: The field with the text before the answer, which carries no loss; needs `answer`.
        answer: The field with the text to learn; needs `prompt`.
        max_record_bytes: A larger record is a bad record; a chunk of records more than four times as large is
            an error.
    """

    paths: tuple[str, ...]
    record: Literal["text", "json"] = "text"
    text: str = "text"
    prompt: str | None = None
    answer: str | None = None
    max_record_bytes: int = MAX_RECORD_BYTES

    def __post_init__(self) -> None:
        check_positive(self, "max_record_bytes")
        self._fields.check()
        if self.record == "text":
            self._fields.check_unused('record="text", which has no fields')

    def documents(self) -> Iterator[Document | BadRecord]:
        files = self.files()
        try:
            from array_record.python.array_record_module import ArrayRecordReader  # pyright: ignore
        except ImportError as error:
            raise missing_library_error("array_record", "an ArrayRecord corpus", "arrayrecord") from error
        for name, path in open_each_local(files):
            count = safe_record_count(path, name, self.max_record_bytes, _RECORDS_AT_ONCE)
            for number, record in enumerate(_records(ArrayRecordReader, str(path), name, count)):
                where = f"{name}, record {number}"
                if len(record) > self.max_record_bytes:
                    yield BadRecord(where, describe_oversize(len(record), self.max_record_bytes))
                else:
                    yield self._document(record, where)

    def _document(self, record: bytes, where: str) -> Document | BadRecord:
        try:
            text = decode_utf8(record, where)
            if self.record == "text":
                return Document(text, where=where)
            return self._fields.document(parse_object(text, where), where)
        except BadRecordError as error:
            return BadRecord(error.where, error.reason)

    def files(self) -> list[DataFile]:
        """Return the files to read."""
        return find_files(self.paths, _PATTERNS)

    def fingerprint(self) -> str:
        return fingerprint(
            "array_record", self.record, self.text, self.prompt, self.answer, *cache_identity(self.files())
        )

    @property
    def _fields(self) -> Fields:
        return Fields(self.text, self.prompt, self.answer)


def _records(reader_type: Any, path: str, name: str, at_once: int) -> Iterator[bytes]:
    reader = reader_type(path)
    try:
        # The reader opens an invalid or truncated file as one without records.
        if not reader.ok():
            raise DataError(f"{name} is not an ArrayRecord file, or is cut short; expected a file of ArrayRecordWriter")
        count = reader.num_records()
        for begin in range(0, count, at_once):
            try:
                block = reader.read(begin, min(begin + at_once, count))
            except (RuntimeError, ValueError, IndexError) as error:
                raise read_error(name, error) from error
            yield from block
    finally:
        with contextlib.suppress(RuntimeError):  # raises the file's error again
            reader.close()
