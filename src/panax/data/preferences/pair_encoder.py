"""Encoding of preference pairs: two documents of a token file for each, the chosen answer's first."""

from collections.abc import Iterator, Sequence

import numpy as np

from panax.core.errors import DataError

from ..chats.conversation import Conversation
from ..chats.encoder import ChatEncoder
from ..files.files import fingerprint
from ..text.corpus import BadRecord, Document
from ..text.encoding import EncodedDocument, TextEncoder
from ..text.tokenizer import Tokenizer
from .pair_records import PreferencePair

_VERSION = 1


class PairEncoder:
    """Encoder of preference pairs, a `DocumentEncoder`.

    Texts end with the tokenizer's end of a document, conversations as their template has it.
    """

    end_of_document: int | None = None

    def __init__(self, tokenizer: Tokenizer, chats: ChatEncoder | None) -> None:
        """Prepare to encode.

        Args:
            chats: Encoder of conversations; None if the tokenizer has no chat template.
        """
        self._chats = chats
        self._texts = TextEncoder(tokenizer)
        self._eos = tokenizer.end_of_document
        self.tokenizer = tokenizer if chats is None else chats.tokenizer
        self.fingerprint = fingerprint("pairs", _VERSION, "" if chats is None else chats.fingerprint)

    def encode(self, documents: Sequence[Document]) -> Iterator[list[EncodedDocument] | BadRecord]:
        """Yield the chosen and the rejected answer of each pair, each after the prompt.

        Raises:
            DataError: A document is not a pair, or a conversation without a chat template.
        """
        pairs = [_as_pair(document) for document in documents]
        halves = iter(self._encode_halves([half for pair in pairs for half in (pair.chosen, pair.rejected)]))
        for pair in pairs:
            yield _check_pair(pair.where, next(halves), next(halves))

    def finish(self, num_documents: int) -> None:
        """Accept any pairs: each was checked alone."""

    def has_special_tokens(self, document: Document) -> bool:
        pair = _as_pair(document)
        return any(self._texts.has_special_tokens(half) for half in (pair.chosen, pair.rejected))

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


def _as_pair(document: Document) -> PreferencePair:
    if not isinstance(document, PreferencePair):
        raise DataError(
            f"{document.where or 'a document'} is not a preference pair; a corpus of Preferences holds nothing else"
        )
    return document


def _check_pair(
    where: str, chosen: list[EncodedDocument] | BadRecord, rejected: list[EncodedDocument] | BadRecord
) -> list[EncodedDocument] | BadRecord:
    pair: list[EncodedDocument] = []
    for name, half in (("chosen", chosen), ("rejected", rejected)):
        if isinstance(half, BadRecord):
            return half
        if len(half) != 1:
            reason = (
                "is blank"
                if not half
                else "has several answers, of which the chat template shows earlier ones in another way than the last; split it "
                "into one pair for each"
            )
            return BadRecord(where, f"the {name} answer {reason}")
        if not _has_loss(half[0]):
            return BadRecord(
                where,
                f"the {name} answer has no token to learn: no message after the prompt has the role 'assistant', or its weight "
                f"is 0",
            )
        pair += half
    if list(pair[0].ids) == list(pair[1].ids):
        return BadRecord(
            where, "chosen and rejected are the same tokens, so there is no preference to learn; remove the pair"
        )
    return pair


def _has_loss(document: EncodedDocument) -> bool:
    """Return True if a token after the first carries loss."""
    if document.loss is not None:
        return bool(np.any(document.loss[1:]))
    return len(document.ids) > max(document.num_prompt_tokens, 1)
