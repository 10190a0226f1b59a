"""Encoding of a corpus's documents to ids, with the loss of each: plain texts here, and the interface for other kinds."""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .corpus import BadRecord, Corpus, CorpusFilter, Document
from .tokenizer import Tokenizer

_PIECE_CHARACTERS = 2**18
_WORD_BOUNDARY = re.compile(r"(?<=\S)\s")


class EncodedDocument(NamedTuple):
    """Ids of a document, and which of them carry loss.

    Attributes:
        ids: Ids, without the end of the document.
        num_prompt_tokens: The first ids, which carry no loss.
        loss: For each id, 1 if it carries loss as a target; None if all after the prompt do.
    """

    ids: Sequence[int]
    num_prompt_tokens: int = 0
    loss: npt.NDArray[np.uint8] | None = None


class DocumentEncoder(Protocol):
    """Interface of encoders.

    Attributes:
        fingerprint: A hash of everything except the tokenizer that determines ids and loss; "" for nothing.
        tokenizer: The tokenizer, with additions such as a chat template.
        end_of_document: The id that follows each document; None if documents end by themselves.
    """

    fingerprint: str
    tokenizer: Tokenizer
    end_of_document: int | None

    def encode(self, documents: Sequence[Document]) -> Iterator[list[EncodedDocument] | BadRecord]:
        """Yield the encoded forms of each document: none if it is blank, one or several; or a `BadRecord`."""
        ...

    def finish(self, num_documents: int) -> None:
        """Check the documents as a whole, after the last one.

        Raises:
            DataError: The documents can't be trained on.
        """
        ...

    def has_special_tokens(self, document: Document) -> bool:
        """Return True if a document's own text spells one of the tokenizer's special tokens."""
        ...


@runtime_checkable
class EncodedCorpus(Protocol):
    """Interface of corpora with documents that are not plain texts."""

    def encoder(self, tokenizer: Tokenizer) -> DocumentEncoder: ...


def inner_corpus(corpus: Corpus) -> Corpus:
    """Return the corpus that yields the documents, without a filter around it."""
    return corpus.corpus if isinstance(corpus, CorpusFilter) else corpus


def make_encoder(corpus: Corpus, tokenizer: Tokenizer) -> DocumentEncoder:
    """Return the encoder of a corpus's documents.

    Raises:
        DataError: The tokenizer does not suit the documents.
    """
    inner = inner_corpus(corpus)
    return inner.encoder(tokenizer) if isinstance(inner, EncodedCorpus) else TextEncoder(tokenizer)


class TextEncoder:
    """Encoder of texts, or prompts and answers; special tokens in them are encoded as the characters they are.

    Prompts and answers are encoded separately, so that the mask boundary is between two tokens. With a tokenizer that puts a
    space before each text they are encoded as one text and split at the answer: encoded separately, each answer would begin
    with an additional space.
    """

    fingerprint = ""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end_of_document: int | None = tokenizer.end_of_document
        self._special = tokenizer.special_pattern

    def encode(self, documents: Sequence[Document]) -> Iterator[list[EncodedDocument]]:
        """Yield each document's ids; a document without text and prompt is blank."""
        for document, (prompt, text) in zip(documents, self._pairs(documents), strict=True):
            # An empty answer is a training target too: end at once. A blank text is not.
            if not document.prompt.strip() and not document.text.strip():
                yield []
                continue
            # A document's first token is not a target; after a prompt, no token of the prompt is one.
            start = list(self.tokenizer.start_of_document)
            unread = len(start) + len(prompt) if prompt else max(len(start) - 1, 0)
            yield [EncodedDocument(start + prompt + text, unread)]

    def finish(self, num_documents: int) -> None:
        """Accept any documents."""

    def has_special_tokens(self, document: Document) -> bool:
        return self._special is not None and any(map(self._special.search, (document.prompt, document.text)))

    def _pairs(self, documents: Sequence[Document]) -> list[tuple[list[int], list[int]]]:
        """Return the ids of each document's prompt, and of its text."""
        if self.tokenizer.marks_beginnings:
            return self.tokenizer.encode_pairs([(document.prompt, document.text) for document in documents])
        pieces = [(_split_text(document.prompt), _split_text(document.text)) for document in documents]
        encoded = iter(self.tokenizer.encode_batch([piece for pair in pieces for part in pair for piece in part]))

        def of(part: list[str]) -> list[int]:
            return list(itertools.chain.from_iterable(itertools.islice(encoded, len(part))))

        return [(of(prompt), of(text)) for prompt, text in pieces]


def _split_text(text: str) -> list[str]:
    """Cut a long text into pieces that several cores can encode, each before white space that follows a word.

    Byte-level tokenizers split words there anyway, so the tokens stay the same.
    """
    pieces, begin = [], 0
    while len(text) - begin > _PIECE_CHARACTERS:
        boundary = _WORD_BOUNDARY.search(text, begin + _PIECE_CHARACTERS)
        if boundary is None:
            break
        pieces.append(text[begin : boundary.start()])
        begin = boundary.start()
    return [*pieces, text[begin:]]
