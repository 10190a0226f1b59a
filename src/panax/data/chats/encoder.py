"""Encoding of conversations: rendered by the chat template, special tokens as such, loss on answers and their ends."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from panax.core.errors import DataError

from ..files.files import fingerprint
from ..text.corpus import BadRecord, Document
from ..text.encoding import EncodedDocument
from ..text.tokenizer import EncodedText, Tokenizer
from .answers import RenderedChat, render_answers
from .conversation import Conversation, make_conversation
from .template import ChatTemplate, RenderError

_VERSION = 1
MAX_EMPTY_SHARE = 0.01
"""Share of conversations that may lack an answer to learn."""

_PROBE = ({"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"})


class ChatEncoder:
    """Encoder of conversations, a `DocumentEncoder`.

    The token that ends an answer always carries loss: the special token after the text that the template marks, or the last one
    before the next message. If a template ends answers without a special token, the tokenizer's end of a document follows the
    last answer.

    Attributes:
        answer_ends: Ids of special tokens that end answers; a model's generation stops at them.
    """

    end_of_document: int | None = None

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, tool_template: ChatTemplate | None = None) -> None:
        """Prepare to encode.

        Args:
            tool_template: Template of conversations with tools, if it differs.
        """
        self._template, self._tool_template = template, tool_template or template
        self._special_ids = tokenizer.all_special_ids
        self._bos = tokenizer.special_ids["bos_token_id"]
        self._eos = tokenizer.end_of_document
        self._special = tokenizer.special_pattern
        self._empty: list[str] = []
        self._encode = tokenizer.encode_rendered
        self.fingerprint = fingerprint("chat", _VERSION, template.key, self._tool_template.key)
        self.answer_ends = self._find_answer_ends()
        self.tokenizer = tokenizer.with_chat(template.source, self.answer_ends)

    def encode(self, documents: Sequence[Document]) -> Iterator[list[EncodedDocument] | BadRecord]:
        """Yield the encoded conversation, or one for each answer; `BadRecord` if the template fails on it.

        Raises:
            DataError: A text begins with two BOS tokens.
        """
        rendered = [self._render(document) for document in documents]
        texts = [chat.text for chats in rendered if isinstance(chats, list) for chat in chats]
        encoded = iter(self._encode(texts))
        for document, chats in zip(documents, rendered, strict=True):
            if isinstance(chats, BadRecord):
                yield chats
                continue
            documents_of_chat = [self._with_loss(chat, next(encoded), document.where) for chat in chats]
            if not any(each.loss is not None and each.loss[1:].any() for each in documents_of_chat):
                self._empty.append(document.where)
            yield documents_of_chat

    def finish(self, num_documents: int) -> None:
        """Check that few conversations lack an answer.

        Raises:
            DataError: More than 1 % lack one.
        """
        if len(self._empty) > MAX_EMPTY_SHARE * num_documents:
            raise DataError(
                f"{len(self._empty)} of {num_documents} conversations have no token with loss, for example {self._empty[0]}: no "
                f"message has the role 'assistant', or its weight is 0. At most {MAX_EMPTY_SHARE:.0%} may; remove them"
            )

    def has_special_tokens(self, document: Document) -> bool:
        return self._special is not None and self._special.search(document.text) is not None

    def _render(self, document: Document) -> list[RenderedChat] | BadRecord:
        if not isinstance(document, Conversation):
            raise DataError(
                f"{document.where or 'a document'} is plain text among conversations; use a Mixture of two corpora"
            )
        try:
            return render_answers(document, self._tool_template if document.tools else self._template)
        except RenderError as error:
            return BadRecord(document.where, f"the chat template fails on it: {error}")

    def _with_loss(self, chat: RenderedChat, encoded: EncodedText, where: str) -> EncodedDocument:
        ids, (starts, ends) = list(encoded.ids), encoded.offsets
        if self._bos is not None and ids[:2] == [self._bos] * 2:
            raise DataError(
                f"{where}: the rendered conversation begins with two BOS tokens; the chat template adds one, and so does the "
                f"first message: remove it there"
            )
        loss = np.zeros(len(ids), np.uint8)
        last = -1
        for begin, end in chat.spans:
            inside = np.flatnonzero((ends > begin) & (starts < end) & (ends > starts))
            # An empty answer has no token, but an end to learn.
            first = int(inside[0]) if inside.size else int(np.searchsorted(starts, begin))
            last = self._end_of_answer(ids, chat, starts, ends, first, int(inside[-1]) if inside.size else first - 1)
            loss[first : last + 1] = 1
        rest = chat.text[int(ends[last]) :] if last >= 0 else "-"
        if last >= 0 and ids[last] not in self._special_ids and not rest.strip():
            # Without a token that ends it, a trained model would never stop.
            return EncodedDocument([*ids[: last + 1], self._eos], loss=np.append(loss[: last + 1], np.uint8(1)))
        return EncodedDocument(ids, loss=loss)

    def _end_of_answer(
        self,
        ids: Sequence[int],
        chat: RenderedChat,
        starts: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        first: int,
        last: int,
    ) -> int:
        """Return the index of the last token of an answer that carries loss."""
        if chat.exact:
            following = last + 1
            ended = last >= first and ids[last] in self._special_ids
            return following if not ended and following < len(ids) and ids[following] in self._special_ids else last
        # Up to the next message there may be a line break after the token that ends the answer.
        place = last
        while (
            place > first and ids[place] not in self._special_ids and not chat.text[starts[place] : ends[place]].strip()
        ):
            place -= 1
        return place if ids[place] in self._special_ids else last

    def _find_answer_ends(self) -> tuple[int, ...]:
        """Return the ids that end the answer of a short conversation; empty if the template rejects it, or uses no such ids."""
        try:
            (chat,) = render_answers(make_conversation(_PROBE, where=""), self._template)
            (encoded,) = self._encode([chat.text])
        except (RenderError, ValueError):
            return ()
        made = self._with_loss(chat, encoded, "a conversation")
        trained = np.flatnonzero(made.loss if made.loss is not None else ())
        end = made.ids[int(trained[-1])] if trained.size else None
        return (end,) if end in self._special_ids and end != self._eos else ()
