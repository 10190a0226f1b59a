"""`LabeledAnswers`: a corpus of answers that are each labeled good or bad, from JSON records or Parquet."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from panax.core.errors import RecipeError
from panax.core.validation import Validated

from ..chats.chats import Chats
from ..files.bounds import MAX_RECORD_BYTES
from ..files.files import BadRecordError, DataFile, cache_identity, fingerprint
from ..text.corpus import BadRecord, Document
from .answer_records import ANSWER_FIELDS, AnswerRecord, check_record, exchange_answers
from .answer_rows import AnswerRows, answer_leaves
from .pair_encoder import AnswerEncoder
from .pair_rows import TooLong
from .reference import load_reference

if TYPE_CHECKING:
    from ..text.packing import Documents
    from ..text.text import TextData


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabeledAnswers(Validated):
    """Single answers to prompts, each good or bad, of JSON lines, JSON arrays or Parquet files, for `models.Kto`.

    A record has `prompt`, `completion` and `label`, in TRL's format for unpaired preferences: two texts, or two lists of
    messages, which the tokenizer's chat template renders (`completion` may then be a text, too), and true or false. Beside
    each answer in its row lies the answer of another record after the same prompt, by which KTO estimates the divergence
    from the reference. Only answers carry loss, with the token that ends each.

    Attributes:
        paths: Files, directories or globs, also of object stores.
        group_size: Number of adjacent records among which answers are exchanged: each prompt gets the answer of the record before
            it, the first one that of the last one. TRL has its batch size here.
        too_long: What happens to an answer that is longer than a row, with the other one and their prompts: "refuse" makes it
            an error, "cut" drops the ends of both.
        reference: A file with the reference model's log-probabilities, as `panax.add_reference` writes it.
        template: A file with a chat template; None: the tokenizer's own.
        date: The day, YYYY-MM-DD, for templates that print today's date.
        max_record_bytes: A larger record is a bad record.
    """

    paths: tuple[str, ...]
    group_size: int = 8
    too_long: TooLong = "refuse"
    reference: str | None = None
    template: str | None = None
    date: str | None = None
    max_record_bytes: int = MAX_RECORD_BYTES

    documents_per_group: ClassVar[int] = 2

    @property
    def leaves(self) -> Mapping[str, type]:
        return answer_leaves(has_reference=self.reference is not None)

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise RecipeError(
                f"group_size={self.group_size}; expected at least 2: each prompt gets another record's answer"
            )
        # Checks the settings that both have.
        self._chats()

    def documents(self) -> Iterator[Document | BadRecord]:
        yield from exchange_answers(self._records(), self.group_size)

    def files(self) -> list[DataFile]:
        """Return the files to read."""
        return self._chats().files()

    def fingerprint(self) -> str:
        return fingerprint("labeled_answers", self.group_size, *cache_identity(self.files()))

    def encoder(self, tokenizer: Any) -> AnswerEncoder:
        """Return the encoder of the answers.

        Raises:
            DataError: The chat template is not valid.
        """
        has_template = self.template is not None or "default" in tokenizer.chat_templates
        return AnswerEncoder(tokenizer, self._chats().encoder(tokenizer) if has_template else None)

    def make_rows(self, documents: "Documents", data: "TextData", seed: int) -> AnswerRows:
        """Lay the answers into rows, with the settings of `data`.

        Raises:
            DataError: An answer is too long, or `reference` is not of these tokens.
        """
        reference = None if self.reference is None else load_reference(self.reference, documents.store)
        return AnswerRows(
            documents,
            sequence_length=data.sequence_length,
            seed=seed,
            packing=data.packing,
            buckets=data.buckets,
            too_long=self.too_long,
            reference=reference,
        )

    def _records(self) -> Iterator[AnswerRecord | BadRecord]:
        for where, record in self._chats().records(ANSWER_FIELDS):
            if isinstance(record, BadRecord):
                yield record
                continue
            try:
                yield check_record(record, where)
            except BadRecordError as error:
                yield BadRecord(error.where, error.reason)

    def _chats(self) -> Chats:
        return Chats(paths=self.paths, template=self.template, date=self.date, max_record_bytes=self.max_record_bytes)
