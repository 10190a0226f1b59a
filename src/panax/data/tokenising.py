"""A corpus becomes a token file in the cache, once; after that it is only opened."""

import dataclasses
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from panax.core.errors import DataError, RecipeError

from .cache import cached
from .corpus import Corpus, Document
from .files import fingerprint
from .tokenizer import BytePairTokenizer, PretrainedTokenizer, Progress, Tokenizer
from .tokens import FORMAT_VERSION, TokenFile, TokenStore, TokenWriter, open_tokens

_CHARACTERS_AT_ONCE = 2**22
_DOCUMENTS_AT_ONCE = 2**14
_PIECE_CHARACTERS = 2**18
_WORD_BOUNDARY = re.compile(r"(?<=\S)\s")


def open_corpus(
    corpus: Corpus | TokenFile,
    tokenizer: BytePairTokenizer | PretrainedTokenizer | None,
    root: Path,
    progress: Progress | None,
) -> tuple[Tokenizer | None, TokenStore]:
    """Open the tokens of a corpus, and their tokenizer, from the cache directory `root`; make there what is missing.

    Raises:
        DataError: The corpus or the tokenizer can't be read, or the corpus holds nothing.
    """
    if isinstance(corpus, TokenFile):
        return _open_token_file(corpus, tokenizer, root)
    name = fingerprint("corpus", type(corpus).__name__, corpus.fingerprint())
    encoder = _tokenizer(corpus, tokenizer, name, root, progress)
    store = cached(
        root,
        f"tokens-v{FORMAT_VERSION}-{fingerprint(name, encoder.fingerprint)}",
        build=lambda directory: write_tokens(corpus, encoder, directory, progress=progress),
        read=open_tokens,
    )
    return encoder, store


def _open_token_file(
    corpus: TokenFile, tokenizer: BytePairTokenizer | PretrainedTokenizer | None, root: Path
) -> tuple[Tokenizer | None, TokenStore]:
    store = corpus.open(root)
    encoder = tokenizer.load() if isinstance(tokenizer, PretrainedTokenizer) else None
    if encoder is not None and encoder.vocab_size < store.vocab_size:
        raise DataError(
            f"{corpus.path} has a vocabulary of {store.vocab_size}, the tokenizer one of {encoder.vocab_size}; "
            "expected the tokenizer that made the tokens"
        )
    return encoder, store


def _tokenizer(
    corpus: Corpus,
    tokenizer: BytePairTokenizer | PretrainedTokenizer | None,
    name: str,
    root: Path,
    progress: Progress | None,
) -> Tokenizer:
    if isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer.load()
    if tokenizer is None:
        raise RecipeError("tokenizer=None; a corpus of text needs one, for example BytePairTokenizer()")
    return cached(
        root,
        f"tokenizer-v{FORMAT_VERSION}-{fingerprint(name, dataclasses.astuple(tokenizer))}",
        build=lambda directory: tokenizer.train(corpus, progress=progress).save(directory),
        read=lambda directory: PretrainedTokenizer(path=str(directory)).load(),
    )


def write_tokens(
    corpus: Corpus, tokenizer: Tokenizer, directory: str | Path, *, progress: Progress | None = None
) -> None:
    """Tokenise a corpus into a token file. Prompts and answers are encoded apart, so the mask falls between two tokens.

    Raises:
        DataError: The corpus can't be read, or holds no text.
    """
    with TokenWriter(directory, vocab_size=tokenizer.vocab_size, end_of_document=tokenizer.end_of_document) as writer:
        num_blank = 0
        for block in _blocks(corpus.documents()):
            pieces = [(_cut(document.prompt), _cut(document.text)) for document in block]
            flat = [piece for pair in pieces for part in pair for piece in part]
            encoded = iter(tokenizer.encode_batch(flat))
            for document, (prompt_pieces, text_pieces) in zip(block, pieces, strict=True):
                prompt = list(itertools.chain.from_iterable(itertools.islice(encoded, len(prompt_pieces))))
                text = list(itertools.chain.from_iterable(itertools.islice(encoded, len(text_pieces))))
                # An empty answer is a lesson too: to say nothing. A blank text is none.
                if not document.prompt.strip() and not document.text.strip():
                    num_blank += 1
                    writer.skip()
                else:
                    writer.append(prompt + text, num_prompt_tokens=len(prompt))
            if progress is not None:
                progress("tokenising", writer.num_documents, writer.num_tokens)
        if writer.num_documents == 0:
            what = f"all {num_blank} of its documents are blank" if num_blank else "it has no document"
            raise DataError(f"nothing to train on: {what}; expected text in {corpus}")


def _blocks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in lists of a few million characters: enough for all cores, and little memory."""
    block, size = [], 0
    for document in documents:
        block.append(document)
        size += len(document.text) + len(document.prompt)
        if size >= _CHARACTERS_AT_ONCE or len(block) >= _DOCUMENTS_AT_ONCE:
            yield block
            block, size = [], 0
    if block:
        yield block


def _cut(text: str) -> list[str]:
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
