"""Tokenization of a corpus into a token file in the cache, once; after that it is only opened."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from panax.core.errors import DataError, RecipeError
from panax.core.former_names import with_former_names

from ..files.cache import read_or_build
from ..files.checksums import VERIFIED_FOLDER
from ..files.files import fingerprint
from .corpus import BadRecord, Corpus, Document
from .encoding import DocumentEncoder, EncodedCorpus, inner_corpus, make_encoder
from .record_checks import (
    BAD_RECORDS,
    DEFAULT_LIMITS,
    RecordLimits,
    UsableDocuments,
    raise_bad_records,
    read_bad_records,
)
from .token_file import TokenFile
from .tokenizer import BytePairTokenizer, PretrainedTokenizer, Progress, Tokenizer
from .tokens import FORMAT_VERSION, TokenStore, TokenWriter, open_tokens

_CHARACTERS_AT_ONCE = 2**22
_DOCUMENTS_AT_ONCE = 2**14


def open_corpus(
    corpus: Corpus | TokenFile,
    tokenizer: BytePairTokenizer | PretrainedTokenizer | None,
    root: Path,
    progress: Progress | None,
    limits: RecordLimits = DEFAULT_LIMITS,
) -> tuple[Tokenizer | None, TokenStore]:
    """Open the tokens of a corpus, and their tokenizer, from the cache directory `root`; build them there if
    they are missing.

    Raises:
        DataError: The corpus or the tokenizer can't be read, or the corpus is empty, or has too many bad
            records.
    """
    encoder, (store,) = open_corpora([corpus], tokenizer, root, progress, limits)
    return encoder, store


def open_corpora(
    corpora: Sequence[Corpus | TokenFile],
    tokenizer: BytePairTokenizer | PretrainedTokenizer | None,
    root: Path,
    progress: Progress | None,
    limits: RecordLimits = DEFAULT_LIMITS,
) -> tuple[Tokenizer | None, list[TokenStore]]:
    """Open the tokens of several corpora that share one tokenizer; it is trained on all of them, document by
    document.

    Raises:
        DataError: As `open_corpus` does.
    """
    texts = [corpus for corpus in corpora if not isinstance(corpus, TokenFile)]
    names = [_name(corpus, limits) for corpus in texts]
    encoder: Tokenizer | None = None
    if texts:
        encoder = _tokenizer(texts, names, tokenizer, root, progress, limits)
    elif isinstance(tokenizer, PretrainedTokenizer):
        encoder = tokenizer.load()
    stores, name_of = [], iter(names)
    for corpus in corpora:
        if isinstance(corpus, TokenFile):
            stores.append(_open_token_file(corpus, encoder, root))
            continue
        assert encoder is not None
        documents = make_encoder(corpus, encoder)
        stores.append(_open_text(corpus, next(name_of), documents, root, progress, limits))
        encoder = documents.tokenizer
    return encoder, stores


def _name(corpus: Corpus, limits: RecordLimits) -> str:
    too_long = () if limits.max_characters is None else (limits.max_characters,)
    return fingerprint("corpus", with_former_names(type(corpus).__name__), corpus.fingerprint(), *too_long)


def _open_text(
    corpus: Corpus, name: str, encoder: DocumentEncoder, root: Path, progress: Progress | None, limits: RecordLimits
) -> TokenStore:
    together = ("together",) if encoder.tokenizer.marks_beginnings else ()
    kind = (encoder.fingerprint,) if encoder.fingerprint else ()
    entry = f"tokens-v{FORMAT_VERSION}-{fingerprint(name, encoder.tokenizer.fingerprint, *together, *kind)}"
    store = read_or_build(
        root,
        entry,
        build=lambda directory: write_documents(corpus, encoder, directory, progress, limits),
        read=lambda directory: open_tokens(directory, verified_dir=root / VERIFIED_FOLDER),
    )
    if store.num_bad_records:
        bad = read_bad_records(root / entry)
        raise_bad_records(store.num_bad_records, limits.max_bad_records, bad)
        if progress is not None:
            first = f"; the first is {bad[0].where}: {bad[0].reason}" if bad else ""
            what = (
                f"{store.num_bad_records} bad records skipped (see {root / entry / BAD_RECORDS}{first}), which leaves"
            )
            progress(what, len(store.offsets) - 1, len(store.tokens))
    return store


def _open_token_file(corpus: TokenFile, encoder: Tokenizer | None, root: Path) -> TokenStore:
    store = corpus.open(root)
    if encoder is not None and encoder.vocab_size < store.vocab_size:
        raise DataError(
            f"{corpus.path} has a vocabulary of {store.vocab_size}, the tokenizer one of {encoder.vocab_size}; "
            "expected the tokenizer that made the tokens"
        )
    return store


def _tokenizer(
    corpora: list[Corpus],
    names: list[str],
    tokenizer: BytePairTokenizer | PretrainedTokenizer | None,
    root: Path,
    progress: Progress | None,
    limits: RecordLimits,
) -> Tokenizer:
    if isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer.load()
    if tokenizer is None:
        raise RecipeError("tokenizer=None; a corpus of text needs one, for example BytePairTokenizer()")
    if any(isinstance(inner_corpus(corpus), EncodedCorpus) for corpus in corpora):
        raise RecipeError(
            "conversations need the tokenizer of a model, with its special tokens and its chat template; "
            "set tokenizer=PretrainedTokenizer(path=...), or --init hf:DIR"
        )
    name = names[0] if len(names) == 1 else fingerprint("corpora", *names)
    return read_or_build(
        root,
        f"tokenizer-v{FORMAT_VERSION}-{fingerprint(name, dataclasses.astuple(tokenizer))}",
        build=lambda directory: tokenizer.train(_InterleavedCorpora(corpora, limits), progress=progress).save(
            directory
        ),
        read=lambda directory: PretrainedTokenizer(path=str(directory)).load(),
    )


class _InterleavedCorpora:
    """Documents of several corpora in turn, so that a tokenizer that reads only the first documents sees each
    corpus."""

    def __init__(self, corpora: list[Corpus], limits: RecordLimits) -> None:
        self._corpora = [UsableDocuments(corpus, limits) for corpus in corpora]

    def documents(self) -> Iterator[Document]:
        going = [corpus.documents() for corpus in self._corpora]
        while going:
            for documents in tuple(going):
                document = next(documents, None)
                if document is None:
                    going.remove(documents)
                else:
                    yield document

    def fingerprint(self) -> str:
        return fingerprint("together", *(corpus.fingerprint() for corpus in self._corpora))


def write_tokens(
    corpus: Corpus,
    tokenizer: Tokenizer,
    directory: str | Path,
    *,
    progress: Progress | None = None,
    limits: RecordLimits = DEFAULT_LIMITS,
) -> None:
    """Tokenize a corpus into a token file.

    Raises:
        DataError: The corpus can't be read, holds no text, or has too many bad records; or the tokenizer does not suit it.
    """
    write_documents(corpus, make_encoder(corpus, tokenizer), Path(directory), progress, limits)


def write_documents(
    corpus: Corpus, encoder: DocumentEncoder, directory: Path, progress: Progress | None, limits: RecordLimits
) -> None:
    """Encode a corpus's documents into a token file.

    Raises:
        DataError: As `write_tokens` does.
    """
    checked, tokenizer = UsableDocuments(corpus, limits), encoder.tokenizer
    with TokenWriter(directory, vocab_size=tokenizer.vocab_size, end_of_document=encoder.end_of_document) as writer:
        num_blank = num_documents = 0
        writer.tokenizer = tokenizer.fingerprint
        for block in _blocks(checked.documents()):
            for document, encoded in zip(block, encoder.encode(block), strict=True):
                if isinstance(encoded, BadRecord):
                    checked.skip(encoded)
                    continue
                num_documents += 1
                if not encoded:
                    num_blank += 1
                    writer.skip()
                    continue
                writer.num_empty_answers += bool(document.prompt) and not document.text
                writer.num_with_special_tokens += encoder.has_special_tokens(document)
                for each in encoded:
                    writer.append(each.ids, num_prompt_tokens=each.num_prompt_tokens, loss=each.loss)
            if progress is not None:
                progress("tokenizing", writer.num_documents, writer.num_tokens)
        writer.num_bad_records, writer.num_filtered_documents = len(checked.bad), checked.num_filtered
        checked.save(directory)
        if writer.num_documents == 0:
            raise DataError(f"nothing to train on: {_why_empty(num_blank, checked)}; expected text in {corpus}")
        encoder.finish(num_documents)


def _why_empty(num_blank: int, checked: UsableDocuments) -> str:
    found = {"blank": num_blank, "bad": len(checked.bad), "removed by the filter": checked.num_filtered}
    reasons = [f"{count} {what}" for what, count in found.items() if count]
    if not reasons:
        return "it has no document"
    if len(reasons) == 1:
        count, _, what = reasons[0].partition(" ")
        return f"all {count} of its documents are {what}"
    return f"of its documents {', '.join(reasons)}"


def _blocks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Yield documents in lists of a few million characters: enough for all cores, and little memory."""
    block, size = [], 0
    for document in documents:
        block.append(document)
        size += len(document.text) + len(document.prompt)
        if size >= _CHARACTERS_AT_ONCE or len(block) >= _DOCUMENTS_AT_ONCE:
            yield block
            block, size = [], 0
    if block:
        yield block
