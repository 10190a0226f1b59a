"""Concatenation of several corpora."""

import dataclasses
from collections.abc import Iterator

from panax.core.errors import RecipeError, describe_type
from panax.core.former_names import with_former_names
from panax.core.validation import Validated

from ..files.files import fingerprint
from .corpus import BadRecord, Corpus, Document


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConcatCorpus(Validated):
    """The documents of several corpora, one corpus after the other: each contributes in proportion to its
    size. A `Mixture` weights its parts.

    Attributes:
        corpora: Corpora of text; tokenized corpora can't be concatenated.
    """

    corpora: tuple[Corpus, ...]

    def __post_init__(self) -> None:
        if not self.corpora:
            raise RecipeError("corpora=(); expected at least one corpus")
        for corpus in self.corpora:
            if not isinstance(corpus, Corpus):
                raise RecipeError(f"corpora holds {describe_type(corpus)}; expected corpora of text")
            if hasattr(corpus, "encoder"):
                raise RecipeError(
                    f"corpora holds {describe_type(corpus)}, with documents that are not plain texts; name all of "
                    f"its files in one corpus, or write a Mixture"
                )

    def documents(self) -> Iterator[Document | BadRecord]:
        for corpus in self.corpora:
            yield from corpus.documents()

    def fingerprint(self) -> str:
        return fingerprint(
            "joined", *([with_former_names(type(each).__name__), each.fingerprint()] for each in self.corpora)
        )
