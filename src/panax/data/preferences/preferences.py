"""`Preferences`: a corpus of preference pairs, from JSON records or Parquet."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

from ..files.files import cache_identity, fingerprint
from ..text.corpus import BadRecord, Document
from ..text.token_source import TEXT_LEAVES
from .answer_corpus import AnswerCorpus
from .pair_encoder import PairEncoder
from .pair_records import PAIR_FIELDS, read_pair
from .pair_rows import PAIR_LEAVES, PairRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preferences(AnswerCorpus):
    """Pairs of answers to a prompt, of JSON lines, JSON arrays or Parquet files, for `models.Preference`.

    A record has `prompt`, `chosen` and `rejected`, in TRL's formats: three texts, or three lists of messages, which the
    tokenizer's chat template renders (`chosen` and `rejected` may then be texts, too). Without `prompt`, it is what both
    answers begin with. Both answers of a pair lie in one row, and only they carry loss, with the token that ends each.

    Attributes:
        paths: Files, directories or globs, also of object stores.
        too_long: What happens to a pair that is longer than a row, with both answers and their prompts: "refuse" makes it an
            error, "cut" drops the ends of its answers: each keeps half a row, or the room that the other leaves.
        reference: A file with the reference model's log-probabilities, as `panax.add_reference` writes it; None for
            losses without a reference model.
        template: A file with a chat template; None: the tokenizer's own.
        date: The day, YYYY-MM-DD, for templates that print today's date.
        max_record_bytes: A larger record is a bad record.
    """

    encoder_type: ClassVar[type[PairEncoder]] = PairEncoder
    rows_type: ClassVar[type[PairRows]] = PairRows

    @property
    def leaves(self) -> Mapping[str, type]:
        return TEXT_LEAVES if self.reference is None else PAIR_LEAVES

    def documents(self) -> Iterator[Document | BadRecord]:
        yield from self._read(PAIR_FIELDS, read_pair)

    def fingerprint(self) -> str:
        return fingerprint("preferences", *cache_identity(self.files()))
