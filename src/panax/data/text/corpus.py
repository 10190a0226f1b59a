"""The corpus interface, and two corpora of text files: any files, and the sources of the Python standard
library.

A corpus is a config that yields documents in a fixed order and has a fingerprint that changes when they do.
"""

import dataclasses
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from panax.core.errors import DataError
from panax.core.validation import Validated

from ..files.files import (
    BadRecordError,
    DataFile,
    cache_identity,
    decode_utf8,
    find_files,
    fingerprint,
    open_each_local,
    read_bytes,
    stat_files,
)
from .python_definitions import extract_definitions


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One document to train on.

    Attributes:
        text: The text to learn; each of its tokens, and the end-of-document token after it, carries loss.
        prompt: Text before `text`, which carries no loss.
        where: The file and the line or row of the document, for messages.
    """

    text: str
    prompt: str = ""
    where: str = dataclasses.field(default="", compare=False, repr=False)


class BadRecord(NamedTuple):
    """A record that can't be read, yielded by a corpus in place of a document.

    Attributes:
        where: The file, and the line or row in it.
        reason: The problem, and what was expected.
    """

    where: str
    reason: str


@runtime_checkable
class Corpus(Protocol):
    """Interface of corpora, implemented by any class with these two methods."""

    def documents(self) -> Iterator[Document | BadRecord]:
        """Yield the documents, always in the same order, and a `BadRecord` in place of each that can't be
        read.
        """
        ...

    def fingerprint(self) -> str:
        """Return a hash that changes when the documents do, the key of the tokenized cache. It must be
        cheap.
        """
        ...


@runtime_checkable
class CorpusFilter(Protocol):
    """A corpus that drops documents of another one.

    Attributes:
        corpus: The corpus that yields the documents.
    """

    @property
    def corpus(self) -> Corpus: ...

    def accepts(self, document: Document) -> bool:
        """Return True if a document passes."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles(Validated):
    """UTF-8 text files, one document each.

    Attributes:
        paths: Files, directories or globs, also of object stores (`s3://bucket/texts`).
        pattern: Glob of the files to read in a directory; hidden files are skipped.
        separator: Text that separates the documents of a file (`<|endoftext|>`, a blank line, ...); the
            separator itself is dropped. Empty: each file is one document.
    """

    paths: tuple[str, ...]
    pattern: str = "**/*"
    separator: str = ""

    def documents(self) -> Iterator[Document | BadRecord]:
        for name, path in open_each_local(self.files()):
            try:
                text = decode_utf8(read_bytes(path), name)
            except BadRecordError as error:
                yield BadRecord(error.where, error.reason)
                continue
            for number, part in enumerate(text.split(self.separator) if self.separator else (text,), 1):
                yield Document(part, where=f"{name}, part {number}" if self.separator else name)

    def files(self) -> list[DataFile]:
        """List the files to read."""
        return find_files(self.paths, (self.pattern,))

    def fingerprint(self) -> str:
        return fingerprint("text_files", self.separator, *cache_identity(self.files()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonLibrary(Validated):
    """The sources of the running Python's standard library: real text that exists on every machine.

    Python 3.11 has 612 such files, 11 MB, about 3 million tokens with a vocabulary of 4,096; with its tests,
    1,668 files, 30 MB. The tables of `encodings` are skipped. The files differ between Python versions:
    compare losses on one version only.

    Attributes:
        include_tests: Also read the library's tests, except the few that are deliberately not valid text.
        definitions: Make each top-level function and class a document, without docstrings and comments: 5,105
            documents in Python 3.11, 6 MB.
    """

    include_tests: bool = False
    definitions: bool = False

    def documents(self) -> Iterator[Document]:
        for path in self._files():
            source = read_bytes(path)
            try:
                # Python sources name their own encoding in the first two lines (PEP 263).
                encoding, _ = tokenize.detect_encoding(BytesIO(source).readline)
                text = source.decode(encoding)
                parts = list(extract_definitions(text)) if self.definitions else [text]
                yield from (Document(part, where=str(path)) for part in parts)
            except (SyntaxError, UnicodeDecodeError):
                if not self.include_tests:
                    raise DataError(f"{path} is not valid Python text; repair this Python installation") from None

    def fingerprint(self) -> str:
        kind = ("definitions",) if self.definitions else ()
        return fingerprint("python_library", *kind, *stat_files(self._files()))

    def _files(self) -> list[Path]:
        root = Path(sysconfig.get_path("stdlib"))
        # The encodings are near-identical generated tables; a model trained on them writes little else.
        skipped = {"site-packages", "dist-packages", "__pycache__", "encodings"}
        if not self.include_tests:
            skipped |= {"test", "tests", "idle_test"}
        files = []
        for directory, inside, names in os.walk(root):
            inside[:] = [name for name in inside if name not in skipped]  # avoids walking site-packages
            files += [Path(directory, name) for name in names if name.endswith(".py")]
        if not files:
            raise DataError(
                f"no Python source under {root}; this Python has none, so choose another corpus (TextFiles)"
            )
        return sorted(files)
