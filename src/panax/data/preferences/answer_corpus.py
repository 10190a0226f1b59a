"""`AnswerCorpus`: what corpora of two answers in one row have in common."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from panax.core.validation import Validated

from ..chats.chats import Chats
from ..files.bounds import MAX_RECORD_BYTES
from ..files.files import BadRecordError, DataFile
from ..text.corpus import BadRecord
from .pair_encoder import AnswerEncoder, PairEncoder
from .pair_rows import PairRows, TooLong
from .reference import load_reference

if TYPE_CHECKING:
    from ..text.packing import Documents
    from ..text.text import TextData

Record = TypeVar("Record")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerCorpus(Validated):
    """Base of such corpora, with the settings that they share.

    Attributes:
        encoder_type: Encodes the records.
        rows_type: Lays them into rows.
    """

    paths: tuple[str, ...]
    too_long: TooLong = "refuse"
    reference: str | None = None
    template: str | None = None
    date: str | None = None
    max_record_bytes: int = MAX_RECORD_BYTES

    documents_per_group: ClassVar[int] = 2
    encoder_type: ClassVar[type[PairEncoder] | type[AnswerEncoder]]
    rows_type: ClassVar[type[PairRows]]

    def __post_init__(self) -> None:
        # Checks the settings that both have.
        self._chats()

    def files(self) -> list[DataFile]:
        """Return the files to read."""
        return self._chats().files()

    def encoder(self, tokenizer: Any) -> PairEncoder | AnswerEncoder:
        """Return the encoder of the records.

        Raises:
            DataError: The chat template is not valid.
        """
        has_template = self.template is not None or "default" in tokenizer.chat_templates
        return self.encoder_type(tokenizer, self._chats().encoder(tokenizer) if has_template else None)

    def make_rows(self, documents: "Documents", data: "TextData", seed: int) -> PairRows:
        """Lay the answers into rows, with the settings of `data`.

        Raises:
            DataError: An answer is too long, or `reference` is not of these tokens.
        """
        reference = None if self.reference is None else load_reference(self.reference, documents.store)
        return self.rows_type(
            documents,
            sequence_length=data.sequence_length,
            seed=seed,
            packing=data.packing,
            buckets=data.buckets,
            too_long=self.too_long,
            reference=reference,
        )

    def _read(self, fields: tuple[str, ...], read: Callable[[Any, str], Record]) -> Iterator[Record | BadRecord]:
        """Yield each record of the files as `read` converts it."""
        for where, record in self._chats().records(fields):
            if isinstance(record, BadRecord):
                yield record
                continue
            try:
                yield read(record, where)
            except BadRecordError as error:
                yield BadRecord(error.where, error.reason)

    def _chats(self) -> Chats:
        return Chats(paths=self.paths, template=self.template, date=self.date, max_record_bytes=self.max_record_bytes)
