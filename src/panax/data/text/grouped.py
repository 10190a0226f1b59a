"""Corpora of which several documents belong together: held out together, and in one row."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .encoding import inner_corpus
from .packing import Documents, PackedRowSource
from .token_file import TokenFile

if TYPE_CHECKING:
    from .text import TextData


class GroupedRows(PackedRowSource, Protocol):
    """Rows that never part a group."""

    def describe(self, which: str) -> str:
        """Describe how groups fit into rows, in a line for the user.

        Args:
            which: Name of the groups in the message.
        """
        ...


@runtime_checkable
class GroupedCorpus(Protocol):
    """Interface of such corpora, in addition to `Corpus`.

    Attributes:
        documents_per_group: Number of adjacent documents of the token file that belong together.
        leaves: Names and dtypes of the leaves of its batches.
    """

    documents_per_group: int

    @property
    def leaves(self) -> Mapping[str, type]: ...

    def make_rows(self, documents: Documents, data: "TextData", seed: int) -> GroupedRows:
        """Lay groups into rows, with the settings of `data`.

        Raises:
            DataError: A group does not fit.
        """
        ...


def find_grouped(corpus: Any) -> GroupedCorpus | None:
    """Return the corpus of which documents belong together, without a filter; None for others."""
    inner = corpus if isinstance(corpus, TokenFile) else inner_corpus(corpus)
    return inner if isinstance(inner, GroupedCorpus) else None


def group_size(corpus: Any) -> int:
    """Return the number of adjacent documents that belong together; 1 for other corpora."""
    grouped = find_grouped(corpus)
    return 1 if grouped is None else grouped.documents_per_group
