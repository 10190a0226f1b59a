"""`LabeledAnswers`: a corpus of answers that are each labeled good or bad, from JSON records or Parquet."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

from panax.core.errors import RecipeError

from ..files.files import cache_identity, fingerprint
from ..text.corpus import BadRecord, Document
from .answer_corpus import AnswerCorpus
from .answer_records import ANSWER_FIELDS, check_record, exchange_answers
from .answer_rows import AnswerRows, answer_leaves
from .pair_encoder import AnswerEncoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabeledAnswers(AnswerCorpus):
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

    group_size: int = 8

    encoder_type: ClassVar[type[AnswerEncoder]] = AnswerEncoder
    rows_type: ClassVar[type[AnswerRows]] = AnswerRows

    @property
    def leaves(self) -> Mapping[str, type]:
        return answer_leaves(has_reference=self.reference is not None)

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise RecipeError(
                f"group_size={self.group_size}; expected at least 2: each prompt gets another record's answer"
            )
        super().__post_init__()

    def documents(self) -> Iterator[Document | BadRecord]:
        yield from exchange_answers(self._read(ANSWER_FIELDS, check_record), self.group_size)

    def fingerprint(self) -> str:
        return fingerprint("labeled_answers", self.group_size, *cache_identity(self.files()))
