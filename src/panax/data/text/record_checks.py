"""Validation of a corpus while it is tokenized: unusable records are counted and skipped, up to a limit, and
documents filtered."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from panax.core.errors import DataError, RecipeError
from panax.core.validation import Validated

from ...system import json_reader
from .corpus import BadRecord, Corpus, CorpusFilter, Document

BAD_RECORDS = "bad_records.jsonl"
_SHOWN = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordLimits(Validated):
    """Limits on bad records: which documents count as bad in addition to those that a corpus reports, and how
    many may occur.

    Attributes:
        max_characters: A longer document, prompt and text together, is a bad record; None: no limit.
        max_bad_records: Number of bad records to skip; one more is an error.
    """

    max_characters: int | None = None
    max_bad_records: int = 0

    def __post_init__(self) -> None:
        if self.max_bad_records < 0 or (self.max_characters is not None and self.max_characters < 1):
            raise RecipeError(
                f"max_characters={self.max_characters}, max_bad_records={self.max_bad_records}; expected a positive number of "
                f"characters or None, and 0 or more records"
            )


DEFAULT_LIMITS = RecordLimits()


class UsableDocuments:
    """Usable documents of a corpus.

    Attributes:
        bad: The records that the last pass skipped.
        num_filtered: Number of documents that a filter dropped in the last pass.
    """

    def __init__(self, corpus: Corpus, limits: RecordLimits = DEFAULT_LIMITS) -> None:
        self._corpus = corpus
        self._limits = limits
        self.bad: list[BadRecord] = []
        self.num_filtered = 0

    def __str__(self) -> str:
        return str(self._corpus)

    def fingerprint(self) -> str:
        return self._corpus.fingerprint()

    def documents(self) -> Iterator[Document]:
        """Yield the documents that are neither bad nor filtered out.

        Raises:
            DataError: There are more bad records than the limit.
        """
        self.bad, self.num_filtered = [], 0
        inner = self._corpus.corpus if isinstance(self._corpus, CorpusFilter) else self._corpus
        takes = self._corpus.accepts if isinstance(self._corpus, CorpusFilter) else None
        max_characters = self._limits.max_characters
        for number, document in enumerate(inner.documents(), 1):
            if isinstance(document, BadRecord):
                self.skip(document)
            elif takes is not None and not takes(document):
                self.num_filtered += 1
            elif max_characters is not None and len(document.prompt) + len(document.text) > max_characters:
                size = len(document.prompt) + len(document.text)
                where = getattr(document, "where", "") or f"document {number}"
                self.skip(BadRecord(where, f"{size:,} characters; expected at most max_characters={max_characters}"))
            else:
                yield document

    def skip(self, record: BadRecord) -> None:
        """Count a bad record.

        Raises:
            DataError: There are more bad records than the limit.
        """
        self.bad.append(record)
        raise_bad_records(len(self.bad), self._limits.max_bad_records, self.bad)

    def save(self, directory: Path) -> None:
        """Write the list of skipped records, if there are any."""
        if self.bad:
            lines = (json.dumps({"where": where, "reason": reason}) + "\n" for where, reason in self.bad)
            (directory / BAD_RECORDS).write_text("".join(lines), encoding="utf-8")


def read_bad_records(directory: Path) -> list[BadRecord]:
    """Read the first records that were skipped when the token file in `directory` was written."""
    try:
        with (directory / BAD_RECORDS).open(encoding="utf-8") as lines:
            found = [json_reader.parse(line) for line in itertools.islice(lines, _SHOWN)]
        return [BadRecord(str(record["where"]), str(record["reason"])) for record in found]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # the list of skipped records is gone; the tokens are unharmed


def raise_bad_records(count: int, max_bad_records: int, first: Sequence[BadRecord]) -> None:
    """Raise if there are too many bad records.

    Raises:
        DataError: `count` is more than `max_bad_records`; the message names the first bad records.
    """
    if count <= max_bad_records:
        return
    listed = [f"{where}: {reason}" for where, reason in first[:_SHOWN]]
    if max_bad_records == 0 and count == 1 and listed:
        raise DataError(listed[0])
    raise DataError(
        f"{count} or more bad records, where max_bad_records={max_bad_records}; the first: {'; '.join(listed) or 'unknown'}. "
        "Repair them, or raise max_bad_records"
    )
