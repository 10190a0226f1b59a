"""A corpus filtered by document."""

import dataclasses
import re
from collections.abc import Iterator

from panax.core.errors import RecipeError
from panax.core.former_names import with_former_names
from panax.core.validation import Validated

from ..chats.chats import Chats
from ..files.files import fingerprint
from ..formats.array_record import ArrayRecord
from ..formats.arrow import Arrow
from ..formats.mds import Mds
from ..formats.megatron import MegatronTokens
from ..formats.records import HuggingFaceDisk, Jsonl, Parquet
from ..formats.webdataset import WebDataset
from ..preferences.labeled_answers import LabeledAnswers
from ..preferences.preferences import Preferences
from .concat import ConcatCorpus
from .corpus import BadRecord, Corpus, Document, PythonLibrary, TextFiles
from .token_file import TokenFile

TextCorpus = (
    PythonLibrary
    | TextFiles
    | Jsonl
    | Parquet
    | Arrow
    | ArrayRecord
    | WebDataset
    | Mds
    | HuggingFaceDisk
    | ConcatCorpus
    | Chats
    | Preferences
    | LabeledAnswers
    | Corpus
)
"""Text corpora that a recipe can name, including custom ones."""

PlainCorpus = TextCorpus | TokenFile | MegatronTokens
"""Corpora that a recipe can name, whole or as a part of a mixture."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilteredCorpus(Validated):
    """The documents of another corpus that pass; the others are dropped and counted.

    For other filters, write a custom corpus: a class with a `documents` method that yields the documents to
    retain.

    Attributes:
        corpus: The documents.
        min_characters: Drop shorter documents; prompt and text together.
        max_characters: Drop longer documents.
        keep: Retain only documents in which this regular expression is found.
        drop: Drop documents in which this regular expression is found.
    """

    corpus: TextCorpus
    min_characters: int = 0
    max_characters: int | None = None
    keep: str = ""
    drop: str = ""

    def __post_init__(self) -> None:
        if self.max_characters is not None and self.max_characters < max(self.min_characters, 1):
            raise RecipeError(
                f"max_characters={self.max_characters}; expected at least 1 and min_characters={self.min_characters}"
            )
        for name in ("keep", "drop"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                raise RecipeError(f"{name}={getattr(self, name)!r} is not a regular expression: {error}") from None

    def documents(self) -> Iterator[Document | BadRecord]:
        for document in self.corpus.documents():
            if isinstance(document, BadRecord) or self.accepts(document):
                yield document

    def accepts(self, document: Document) -> bool:
        """Return True if a document passes."""
        if not self.min_characters <= len(document.prompt) + len(document.text) <= (self.max_characters or 2**63):
            return False
        whole = document.prompt + document.text if self.keep or self.drop else ""
        if self.keep and not re.search(self.keep, whole):
            return False
        return not (self.drop and re.search(self.drop, whole))

    def fingerprint(self) -> str:
        settings = (self.min_characters, self.max_characters, self.keep, self.drop)
        return fingerprint(
            "filtered", with_former_names(type(self.corpus).__name__), self.corpus.fingerprint(), *settings
        )
