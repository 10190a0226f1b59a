"""A corpus of WebDataset shards: tar files in which the files of a sample are adjacent and share their name's
prefix."""

import dataclasses
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ...core.errors import DataError
from ...core.validation import Validated
from ..files.bounds import MAX_RECORD_BYTES, check_positive, describe_oversize
from ..files.decompression import SUFFIXES, open_file
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
from .fields import Fields
from .json_records import parse_object

SHARD_PATTERNS = ("**/*.tar", *(f"**/*.tar{end}" for end in SUFFIXES), "**/*.tgz")
_JSON = "json."
_MOST_HEADER_BYTES, _MOST_HEADERS = 2**20, 8
_SPARSE = (tarfile.GNUTYPE_SPARSE,)
_EXTENDED = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)


class ShardSample(NamedTuple):
    """One sample of a shard.

    Attributes:
        where: The shard and the name of the sample, for messages.
        files: Content of its files, by extension: the part of the name after the first dot, in lower case.
    """

    where: str
    files: dict[str, bytes]

    def text(self, extension: str) -> str:
        """Return a file as text.

        Raises:
            BadRecordError: There is no file with that extension, or the file is not UTF-8.
        """
        if extension not in self.files:
            known = ", ".join(map(repr, sorted(self.files))) or "none at all"
            raise BadRecordError(self.where, f"no file {extension!r}; the sample has {known}: name one of them")
        return decode_utf8(self.files[extension], f"{self.where}.{extension}")


class _Member(tarfile.TarInfo):
    """A member of a shard. Headers before a file, such as its long name or attributes, are read entirely, so
    their size is bounded."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type not in _EXTENDED:
            return self._checked(archive)
        # A long name, a long link and attributes may precede one file; tarfile reads each recursively within
        # the previous one.
        depth = getattr(archive, "headers_before", 0) + 1
        if depth > _MOST_HEADERS:
            raise tarfile.ReadError(f"more than {_MOST_HEADERS} headers before a file; expected plain files")
        archive.headers_before = depth  # type: ignore[attr-defined]
        try:
            return self._checked(archive)
        finally:
            archive.headers_before = depth - 1  # type: ignore[attr-defined]

    def _checked(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _SPARSE or (self.type in _EXTENDED and not 0 <= self.size <= _MOST_HEADER_BYTES):
            raise tarfile.ReadError(f"a header of type {self.type!r} and {self.size:,} bytes; expected plain files")
        return super()._proc_member(archive)  # type: ignore[misc]  # "a subclass may override it", says tarfile


def read_samples(path: Path, name: str, max_record_bytes: int) -> Iterator[ShardSample | BadRecord]:
    """Yield the samples of a shard, in its order. Nothing is unpacked to disk.

    Args:
        max_record_bytes: Maximum size of a sample, all its files together; a larger one is a bad record, and
            not read.

    Raises:
        DataError: The shard is not a tar file, or is truncated.
    """
    current, size = "", 0
    files: dict[str, bytes] = {}
    try:
        # As a stream: a shard may be compressed and larger than memory.
        with (
            open_file(path, name) as stream,
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member, errorlevel=1) as shard,
        ):
            while (member := shard.next()) is not None:
                shard.members = []  # type: ignore[misc]  # tarfile keeps them all
                folder, slash, file = member.name.rpartition("/")
                base, dot, extension = file.partition(".")
                if member.issparse():
                    raise tarfile.ReadError(f"{member.name} is a sparse file; expected plain ones")
                if not member.isfile() or not dot or not base:
                    continue
                key = folder + slash + base
                if key != current or extension.lower() in files:
                    if size:
                        yield _sample(f"{name}, {current}", files, size, max_record_bytes)
                    current, size = key, 0
                    files = {}
                # One more, so that an empty file counts.
                size += member.size + 1
                if size <= max_record_bytes:
                    opened = shard.extractfile(member)
                    assert opened is not None
                    files[extension.lower()] = opened.read()
    except (tarfile.TarError, lzma.LZMAError, OSError, EOFError, ValueError, zlib.error, KeyError, IndexError) as error:
        if isinstance(error, DataError):
            raise
        raise read_error(name, error) from error
    if size:
        yield _sample(f"{name}, {current}", files, size, max_record_bytes)


def _sample(where: str, files: dict[str, bytes], size: int, max_record_bytes: int) -> ShardSample | BadRecord:
    return (
        ShardSample(where, files)
        if size <= max_record_bytes
        else BadRecord(where, describe_oversize(size, max_record_bytes))
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WebDataset(Validated):
    """WebDataset shards (`.tar`, also compressed) as text, one sample at a time.

    A field is a file of the sample, named by its extension, the part of its name after the first dot: `txt`.
    `json.body` is the field `body` of the sample's `.json` file.

    Attributes:
        paths: Files, directories (searched for `.tar`, `.tgz` and `.tar.gz`, `.tar.zst`, ...) or globs, also
            of object stores.
        text: The field that holds the document.
        prompt: The field with the text before the answer, which carries no loss; needs `answer`.
        answer: The field with the text to learn; needs `prompt`.
        max_record_bytes: A larger sample, all its files together, is a bad record.
    """

    paths: tuple[str, ...]
    text: str = "txt"
    prompt: str | None = None
    answer: str | None = None
    max_record_bytes: int = MAX_RECORD_BYTES

    def __post_init__(self) -> None:
        check_positive(self, "max_record_bytes")
        self._fields.check(default="txt")

    def documents(self) -> Iterator[Document | BadRecord]:
        for name, path in open_each_local(self.files()):
            for sample in read_samples(path, name, self.max_record_bytes):
                try:
                    yield sample if isinstance(sample, BadRecord) else self._document(sample)
                except BadRecordError as error:
                    yield BadRecord(error.where, error.reason)

    def _document(self, sample: ShardSample) -> Document | BadRecord:
        record: dict[str, object] = {}
        objects = None
        for field in self._fields.names:
            if field.startswith(_JSON) and field not in sample.files:
                objects = parse_object(sample.text("json"), f"{sample.where}.json") if objects is None else objects
                record.update((f"{_JSON}{name}", value) for name, value in objects.items())
            else:
                record[field] = sample.text(field)
        return self._fields.document(record, sample.where)

    def files(self) -> list[DataFile]:
        """Return the files to read."""
        return find_files(self.paths, SHARD_PATTERNS)

    def fingerprint(self) -> str:
        return fingerprint("webdataset", self.text, self.prompt, self.answer, *cache_identity(self.files()))

    @property
    def _fields(self) -> Fields:
        return Fields(self.text, self.prompt, self.answer)
