"""`Preferences`: a corpus of preference pairs, from JSON records or Parquet."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from panax.core.validation import Validated

from ..chats.chats import Chats
from ..files.bounds import MAX_RECORD_BYTES
from ..files.files import BadRecordError, DataFile, cache_identity, fingerprint
from ..text.corpus import BadRecord, Document
from ..text.token_source import TEXT_LEAVES
from .pair_encoder import PairEncoder
from .pair_records import PAIR_FIELDS, read_pair
from .pair_rows import PAIR_LEAVES, PairRows, TooLong
from .reference import load_reference

if TYPE_CHECKING:
    from ..text.packing import Documents
    from ..text.text import TextData


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preferences(Validated):
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

    paths: tuple[str, ...]
    too_long: TooLong = "refuse"
    reference: str | None = None
    template: str | None = None
    date: str | None = None
    max_record_bytes: int = MAX_RECORD_BYTES

    documents_per_group: ClassVar[int] = 2

    @property
    def leaves(self) -> Mapping[str, type]:
        return TEXT_LEAVES if self.reference is None else PAIR_LEAVES

    def __post_init__(self) -> None:
        # Checks the settings that both have.
        self._chats()

    def documents(self) -> Iterator[Document | BadRecord]:
        for where, record in self._chats().records(PAIR_FIELDS):
            if isinstance(record, BadRecord):
                yield record
                continue
            try:
                yield read_pair(record, where)
            except BadRecordError as error:
                yield BadRecord(error.where, error.reason)

    def files(self) -> list[DataFile]:
        """Return the files to read."""
        return self._chats().files()

    def fingerprint(self) -> str:
        return fingerprint("preferences", *cache_identity(self.files()))

    def encoder(self, tokenizer: Any) -> PairEncoder:
        """Return the encoder of the pairs.

        Raises:
            DataError: The chat template is not valid.
        """
        has_template = self.template is not None or "default" in tokenizer.chat_templates
        return PairEncoder(tokenizer, self._chats().encoder(tokenizer) if has_template else None)

    def make_rows(self, documents: "Documents", data: "TextData", seed: int) -> PairRows:
        """Lay the pairs into rows, with the settings of `data`.

        Raises:
            DataError: A pair is too long, or `reference` is not of these tokens.
        """
        reference = None if self.reference is None else load_reference(self.reference, documents.store)
        return PairRows(
            documents,
            sequence_length=data.sequence_length,
            seed=seed,
            packing=data.packing,
            buckets=data.buckets,
            too_long=self.too_long,
            reference=reference,
        )

    def _chats(self) -> Chats:
        return Chats(paths=self.paths, template=self.template, date=self.date, max_record_bytes=self.max_record_bytes)
