"""Encoding of preference pairs: two documents of a token file for each, the chosen answer's first."""

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from panax.core.errors import DataError

from ..chats.conversation import Conversation
from ..chats.encoder import ChatEncoder
from ..files.files import fingerprint
from ..text.corpus import BadRecord, Document
from ..text.encoding import EncodedDocument, TextEncoder
from ..text.tokenizer import Tokenizer
from .answer_records import LabeledAnswer
from .pair_records import PreferencePair

_VERSION = 1

DESIRABLE_LOSS = 2
"""Value of the token file's loss mask for the targets of a good answer; that of others is 1."""


class PairEncoder:
    """Encoder of preference pairs, a `DocumentEncoder`.

    Texts end with the tokenizer's end of a document, conversations as their template has it.
    """

    end_of_document: int | None = None
    kind: ClassVar[str] = "pairs"
    side_names: ClassVar[tuple[str, str]] = ("chosen", "rejected")

    def __init__(self, tokenizer: Tokenizer, chats: ChatEncoder | None) -> None:
        """Prepare to encode.

        Args:
            chats: Encoder of conversations; None if the tokenizer has no chat template.
        """
        self._chats = chats
        self._texts = TextEncoder(tokenizer)
        self._eos = tokenizer.end_of_document
        self.tokenizer = tokenizer if chats is None else chats.tokenizer
        self.fingerprint = fingerprint(self.kind, _VERSION, "" if chats is None else chats.fingerprint)

    def encode(self, documents: Sequence[Document]) -> Iterator[list[EncodedDocument] | BadRecord]:
        """Yield the chosen and the rejected answer of each pair, each after the prompt.

        Raises:
            DataError: A document is not a pair, or a conversation without a chat template.
        """
        pairs = [self.split(document) for document in documents]
        halves = iter(self._encode_halves([half for pair in pairs for half in pair]))
        for document in documents:
            encoded = self._check(document.where, next(halves), next(halves))
            yield encoded if isinstance(encoded, BadRecord) else self.finish_pair(document, encoded)

    def split(self, document: Document) -> tuple[Document, Document]:
        """Return both answers of a record, each after the prompt.

        Raises:
            DataError: The document is not a pair.
        """
        if not isinstance(document, PreferencePair):
            raise DataError(
                f"{document.where or 'a document'} is not a preference pair; a corpus of Preferences holds nothing else"
            )
        return document.chosen, document.rejected

    def finish_pair(self, document: Document, pair: list[EncodedDocument]) -> list[EncodedDocument] | BadRecord:
        """Return both encoded answers, or the reason why they can't be learned."""
        if list(pair[0].ids) == list(pair[1].ids):
            return BadRecord(
                document.where,
                "chosen and rejected are the same tokens, so there is no preference to learn; remove the pair",
            )
        return pair

    def finish(self, num_documents: int) -> None:
        """Accept any pairs: each was checked alone."""

    def has_special_tokens(self, document: Document) -> bool:
        return any(self._texts.has_special_tokens(half) for half in self.split(document))

    def _check(self, where: str, *halves: list[EncodedDocument] | BadRecord) -> list[EncodedDocument] | BadRecord:
        pair: list[EncodedDocument] = []
        for name, half in zip(self.side_names, halves, strict=True):
            if isinstance(half, BadRecord):
                return half
            if len(half) != 1:
                reason = (
                    "is blank"
                    if not half
                    else "has several answers, of which the chat template shows earlier ones in another way than the last; "
                    "split it into one pair for each"
                )
                return BadRecord(where, f"the {name} answer {reason}")
            if not _has_loss(half[0]):
                return BadRecord(
                    where,
                    f"the {name} answer has no token to learn: no message after the prompt has the role 'assistant', or its "
                    f"weight is 0",
                )
            pair += half
        return pair

    def _encode_halves(self, halves: Sequence[Document]) -> Iterator[list[EncodedDocument] | BadRecord]:
        conversations = [half for half in halves if isinstance(half, Conversation)]
        if conversations and self._chats is None:
            raise DataError(
                f"{conversations[0].where}: a pair of conversations needs a chat template, and the tokenizer has none; name a "
                f"file with one in data.corpus.template, or use the tokenizer of the model's instruct version"
            )
        chats = iter(()) if self._chats is None else self._chats.encode(conversations)
        texts = self._texts.encode([half for half in halves if not isinstance(half, Conversation)])
        for half in halves:
            if isinstance(half, Conversation):
                yield next(chats)
            else:
                yield [each._replace(ids=[*each.ids, self._eos]) for each in next(texts)]


def _has_loss(document: EncodedDocument) -> bool:
    """Return True if a token after the first carries loss."""
    if document.loss is not None:
        return bool(np.any(document.loss[1:]))
    return len(document.ids) > max(document.num_prompt_tokens, 1)


class AnswerEncoder(PairEncoder):
    """Encoder of labeled answers: the loss of a good one's tokens is `DESIRABLE_LOSS` in the token file."""

    kind: ClassVar[str] = "answers"
    side_names: ClassVar[tuple[str, str]] = ("labeled", "mismatched")

    def split(self, document: Document) -> tuple[Document, Document]:
        if not isinstance(document, LabeledAnswer):
            raise DataError(
                f"{document.where or 'a document'} is not a labeled answer; a corpus of LabeledAnswers holds nothing else"
            )
        return document.answer, document.mismatched

    def finish_pair(self, document: Document, pair: list[EncodedDocument]) -> list[EncodedDocument] | BadRecord:
        assert isinstance(document, LabeledAnswer)
        answer, mismatched = pair
        loss = answer.loss
        if loss is None:
            loss = (np.arange(len(answer.ids)) >= answer.num_prompt_tokens).astype(np.uint8)
        return [answer._replace(loss=loss * np.uint8(DESIRABLE_LOSS)) if document.desirable else answer, mismatched]
