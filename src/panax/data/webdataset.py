"""A corpus of WebDataset shards: tar files in which the files of one sample stand together and share their name's beginning."""

import dataclasses
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..core.validated import Validated
from .corpus import BadRecord, Document
from .fields import Fields
from .files import BadRecordError, decode_utf8, each_here, file_marks, find_files, fingerprint, unreadable
from .records import parse_object

PATTERNS = ("**/*.tar", "**/*.tar.gz", "**/*.tgz")
_JSON = "json."


class Sample(NamedTuple):
    """One sample of a shard.

    Attributes:
        where: The shard and the name of the sample, for messages.
        files: What its files hold, by what follows the first dot of their names, in lower case.
    """

    where: str
    files: dict[str, bytes]

    def text(self, extension: str) -> str:
        """A file as text.

        Raises:
            BadRecordError: There is none of that extension, or it is not UTF-8.
        """
        if extension not in self.files:
            known = ", ".join(map(repr, sorted(self.files))) or "none at all"
            raise BadRecordError(self.where, f"no file {extension!r}; the sample has {known}: name one of them")
        return decode_utf8(self.files[extension], f"{self.where}.{extension}")


def read_samples(path: Path, name: str) -> Iterator[Sample]:
    """The samples of a shard, in its order. Nothing is unpacked to the disk.

    Raises:
        DataError: It is no tar file, or is cut short.
    """
    current, files = "", {}
    try:
        # As a stream: a shard may be larger than memory, and compressed.
        with tarfile.open(path, "r|*") as shard:
            for member in shard:
                folder, slash, file = member.name.rpartition("/")
                base, dot, extension = file.partition(".")
                if not member.isfile() or not dot or not base:
                    continue
                key = folder + slash + base
                if key != current or extension.lower() in files:
                    if files:
                        yield Sample(f"{name}, {current}", files)
                    current, files = key, {}
                opened = shard.extractfile(member)
                assert opened is not None
                files[extension.lower()] = opened.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise unreadable(name, error) from error
    if files:
        yield Sample(f"{name}, {current}", files)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WebDataset(Validated):
    """WebDataset shards (`.tar`, also compressed) as text, one sample at a time.

    A field is a file of the sample, named by what follows the first dot of its name: `txt`. `json.body` is the field
    `body` of the sample's `.json` file.

    Attributes:
        paths: Files, directories (searched for `.tar`, `.tar.gz` and `.tgz`) or globs, also of object stores.
        text: The field that holds the document.
        prompt: The field that holds what comes before the answer and carries no loss; needs `answer`.
        answer: The field that holds what is learnt; needs `prompt`.
    """

    paths: tuple[str, ...]
    text: str = "txt"
    prompt: str | None = None
    answer: str | None = None

    def __post_init__(self) -> None:
        self._fields.check(default="txt")

    def documents(self) -> Iterator[Document | BadRecord]:
        for name, path in each_here(find_files(self.paths, PATTERNS)):
            for sample in read_samples(path, name):
                try:
                    yield self._document(sample)
                except BadRecordError as error:
                    yield BadRecord(error.where, error.reason)

    def _document(self, sample: Sample) -> Document | BadRecord:
        record: dict[str, object] = {}
        objects = None
        for field in self._fields.names:
            if field.startswith(_JSON) and field not in sample.files:
                objects = parse_object(sample.text("json"), f"{sample.where}.json") if objects is None else objects
                record.update((f"{_JSON}{name}", value) for name, value in objects.items())
            else:
                record[field] = sample.text(field)
        return self._fields.document(record, sample.where)

    def fingerprint(self) -> str:
        files = find_files(self.paths, PATTERNS)
        return fingerprint("webdataset", self.text, self.prompt, self.answer, *file_marks(files))

    @property
    def _fields(self) -> Fields:
        return Fields(self.text, self.prompt, self.answer)
