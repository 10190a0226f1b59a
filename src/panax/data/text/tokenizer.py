"""Tokenizers: trained on the corpus, or existing. Both become a `Tokenizer`.

Texts never become special tokens: `<|endoftext|>` written inside a document is encoded as the characters it
is.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from panax.core.errors import DataError, RecipeError
from panax.core.validation import Validated

from ...system import json_reader
from ...system.files import expand_user
from ..files.files import decode_utf8, fingerprint, read_bytes
from .corpus import Corpus, Document
from .record_checks import UsableDocuments
from .special_tokens import TokenizerCompanions, read_companions, start_token_ids, strip_start_tokens
from .tokens import LARGEST_VOCABULARY

END_OF_DOCUMENT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[EOS]", "[SEP]")
_TEXTS_AT_ONCE = 256

PROGRESS_SECONDS = 5.0
"""Seconds between two progress reports while reading."""

Progress = Callable[[str, int, int], None]
"""Callback for progress: called regularly with the current activity and the numbers of documents and tokens
done."""


class EncodedText(NamedTuple):
    """A text's ids, and the position of each in the text.

    Attributes:
        ids: The ids.
        offsets: Beginning and end of each token in the text, in characters.
    """

    ids: list[int]
    offsets: tuple[np.ndarray, np.ndarray]


class Tokenizer:
    """Conversion of text to token ids and back.

    Attributes:
        vocab_size: One more than the largest id.
        marks_beginnings: True if a text has other tokens at its beginning than after another text, because a
            space is put before it (Llama 2, T5), so that a text can't be encoded in pieces.
        start_of_document: The ids that each document begins with, as the tokenizer's post-processor adds
            them; often one (BOS), or none.
        end_of_document: The id that ends each document.
        end_ids: All ids at which generation stops: `end_of_document`, and those that end an answer.
        special_ids: `bos_token_id`, `eos_token_id` and `pad_token_id`; None for a missing token.
        fingerprint: A hash of everything that determines the ids of a document.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, end_of_document: str, beside: TokenizerCompanions | None = None
    ) -> None:
        """Wrap a Hugging Face tokenizer; its settings for truncation, padding and special tokens are
        disabled.

        Raises:
            DataError: The tokenizer has no token `end_of_document`.
        """
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        vocabulary = backend.get_vocab(with_added_tokens=True)
        if end_of_document not in vocabulary:
            specials = ", ".join(repr(token.content) for token in backend.get_added_tokens_decoder().values())
            raise DataError(
                f"the tokenizer has no token {end_of_document!r}; choose the one that ends a document with "
                f"end_of_document=; its special tokens are: {specials or 'none'}"
            )
        self._backend = backend
        self.start_of_document: tuple[int, ...] = start_token_ids(backend)
        start = [token for i in self.start_of_document if (token := backend.id_to_token(i)) is not None]
        self._beside = (beside or TokenizerCompanions()).set_end_token(end_of_document, start)
        self._vocabulary = vocabulary
        self.special_ids: dict[str, int | None] = self._beside.ids(vocabulary)
        self.end_of_document: int = vocabulary[end_of_document]
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.marks_beginnings = self._differs_in_pieces()
        self.fingerprint: str = fingerprint(
            "tokenizer", json.loads(backend.to_str()), end_of_document, *self.start_of_document
        )

    def find_difference(self, other: "Tokenizer") -> str | None:
        """Describe a token that has another id, or none, in the other tokenizer; None if both have the same tokens."""
        ours, theirs = self._vocabulary, other._vocabulary
        differing = min(
            (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)), default=None
        )
        if differing is None:
            return None
        ids = ["no id" if ids.get(differing) is None else f"the id {ids[differing]}" for ids in (ours, theirs)]
        return f"{differing!r} has {ids[0]} in one, and {ids[1]} in the other"

    def encode(self, text: str) -> list[int]:
        """Encode one text, without special tokens; a document begins with `start_of_document` before it."""
        with _panics_are_errors("a text can't be encoded"):
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts, without special tokens, on all cores (unless `TOKENIZERS_PARALLELISM` is false)."""
        with _panics_are_errors("texts can't be encoded"):
            return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """Encode pairs of consecutive texts as one text, and split the ids at the second.

        An id that spans both texts belongs to the second.
        """
        with _panics_are_errors("texts can't be encoded"):
            encodings = self._backend.encode_batch(
                [first + second for first, second in pairs], add_special_tokens=False
            )
        id_pairs = []
        for (first, _), encoding in zip(pairs, encodings, strict=True):
            ends = [end for _, end in encoding.offsets]
            cut = next((place for place, end in enumerate(ends) if end > len(first)), len(ends))
            id_pairs.append((encoding.ids[:cut], encoding.ids[cut:]))
        return id_pairs

    @functools.cached_property
    def all_special_ids(self) -> frozenset[int]:
        """Return the ids of all special tokens."""
        tokens = self._backend.get_added_tokens_decoder()
        return frozenset(number for number, token in tokens.items() if token.special)

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Return a pattern that finds special tokens spelled in a text; None if there are none."""
        tokens = self._backend.get_added_tokens_decoder().values()
        contents = sorted({token.content for token in tokens if token.special and token.content}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, contents))) if contents else None

    @property
    def role_tokens(self) -> dict[str, str]:
        """Return the special tokens by role (`bos_token`, `eos_token`, ...), as chat templates name them."""
        return self._beside.role_tokens()

    @property
    def chat_templates(self) -> dict[str, str]:
        """Return the chat templates by name: "default", and sometimes "tool_use"; empty without one."""
        return self._beside.chat_templates()

    @property
    def end_ids(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys([self.end_of_document, *self._beside.end_ids()]))

    def with_chat(self, template: str, end_ids: Sequence[int]) -> "Tokenizer":
        """Return the tokenizer with this chat template, and with further ids at which generation stops."""
        made = copy.copy(self)
        made._beside = self._beside.with_chat(template, [each for each in end_ids if each != self.end_of_document])
        return made

    def encode_rendered(self, texts: Sequence[str]) -> list[EncodedText]:
        """Encode texts, with the ids of special tokens where these are spelled out; no others are added."""
        with _panics_are_errors("texts can't be encoded"):
            encodings = self._with_special_tokens.encode_batch(list(texts), add_special_tokens=False)
        offsets = [np.array(encoding.offsets, np.int64).reshape(-1, 2) for encoding in encodings]
        return [
            EncodedText(each.ids, (bounds[:, 0], bounds[:, 1])) for each, bounds in zip(encodings, offsets, strict=True)
        ]

    @functools.cached_property
    def _with_special_tokens(self) -> tokenizers.Tokenizer:
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = False
        return backend

    def _differs_in_pieces(self) -> bool:
        """Return True if two texts that are encoded separately decode to another text than both encoded as
        one."""
        for first, second in (("a", "b"), ("a:", " b"), ("[", "a"), ("a ", "b")):
            apart = self.decode([*self.encode(first), *self.encode(second)])
            if apart != self.decode(self.encode(first + second)):
                return True
        return False

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Decode ids to text; special tokens are included as they are spelled."""
        with _panics_are_errors("ids can't be decoded"):
            return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def to_json(self) -> str:
        """Return the text of its `tokenizer.json`."""
        return self._backend.to_str()

    def add_generation_config(self, folder: str | Path) -> "Tokenizer":
        """Return the tokenizer with the generation settings of the model in a folder, unless it has its own.

        Raises:
            DataError: The folder's `generation_config.json` is broken.
        """
        if self._beside.generation is not None:
            return self
        made = copy.copy(self)
        made._beside = dataclasses.replace(self._beside, generation=read_companions(expand_user(folder)).generation)
        return made

    def save(self, directory: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which Hugging Face's libraries read too.

        The chat template and `generation_config.json`, if they were found next to the tokenizer when it was
        read, are written too.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        # Not the library's `save`, which raises a plain Exception without a path.
        (directory / "tokenizer.json").write_text(self._backend.to_str(pretty=True), encoding="utf-8")
        for name, text in self._beside.files(self._vocabulary):
            (directory / name).write_text(text, encoding="utf-8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BytePairTokenizer(Validated):
    """Byte-level byte-pair encoding, trained on the corpus itself: any text can be encoded, and is decoded
    exactly.

    Attributes:
        vocab_size: Maximum number of ids; a small corpus may yield fewer. At least 257.
        train_bytes: Train on the first documents up to this many characters of text.

    Source: Sennrich et al. (arXiv:1508.07909); on bytes as in GPT-2.
    """

    vocab_size: int = 8192
    train_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        if self.vocab_size < 257:
            raise RecipeError(
                f"vocab_size={self.vocab_size}; expected at least 257: each byte, and the end of a document"
            )
        if self.train_bytes < 1:
            raise RecipeError(f"train_bytes={self.train_bytes}; expected at least 1")

    def train(self, corpus: Corpus, *, progress: Progress | None = None) -> Tokenizer:
        """Train on the corpus. The same texts give the same tokenizer.

        Raises:
            DataError: The corpus can't be read, or has a bad record.
        """
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=self.vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        texts = _training_texts(UsableDocuments(corpus).documents(), self.train_bytes, progress)
        backend.train_from_iterator(texts, trainer=trainer)
        return Tokenizer(backend, end_of_document=END_OF_DOCUMENT)


def _training_texts(documents: Iterator[Document], limit: int, progress: Progress | None) -> Iterator[list[str]]:
    size = count = 0
    told = time.monotonic()
    while size < limit and (block := list(itertools.islice(documents, _TEXTS_AT_ONCE))):
        texts = [text for document in block for text in (document.text, document.prompt) if text]
        size += sum(map(len, texts))
        count += len(block)
        yield texts
        if progress is not None and time.monotonic() - told >= PROGRESS_SECONDS:
            progress("training the tokenizer", count, 0)
            told = time.monotonic()
    if progress is not None:
        progress("training the tokenizer", count, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainedTokenizer(Validated):
    """An existing tokenizer, in Hugging Face's format.

    Attributes:
        path: A `tokenizer.json`, or a directory that holds one.
        end_of_document: The token that ends each document. None: the `eos_token` of the
            `tokenizer_config.json` in its folder, else the first of the usual ones (`<|endoftext|>`,
            `</s>`, ...) that it has.
        add_bos: Begin each document, and each prompt, with the tokens that the tokenizer's post-processor
            puts before a text, as in `transformers`: a BOS token, or nothing. False: with nothing; the
            tokenizer is saved in that form.
    """

    path: str
    end_of_document: str | None = None
    add_bos: bool = True

    def load(self) -> Tokenizer:
        """Read the tokenizer.

        Raises:
            DataError: The file is missing or broken, or the token that ends a document is unknown.
            RecipeError: add_bos=False is not supported by the tokenizer.
        """
        path = expand_user(self.path)
        if path.is_dir():
            path = _in_folder(path)
        text = decode_utf8(read_bytes(path), str(path))
        _check_ids(text, str(path))
        with _panics_are_errors(f"{path} is damaged"):
            try:
                backend = tokenizers.Tokenizer.from_str(text)
                added = not self.add_bos and start_token_ids(backend)
                if added:
                    backend = tokenizers.Tokenizer.from_str(strip_start_tokens(text, str(path)))
                _check_added(text, backend, str(path))
            except (RecipeError, DataError):
                raise
            except Exception as error:  # the library raises bare Exception
                message = f"{path} is not a tokenizer that this tokenizers {tokenizers.__version__} can read: {error}"
                raise DataError(f"{message}; expected a tokenizer.json of Hugging Face's tokenizers") from error
            beside = read_companions(path.parent)
            if added and "add_bos_token" in beside.config:
                beside = dataclasses.replace(beside, config={**beside.config, "add_bos_token": False})
            end = self.end_of_document or beside.token("eos") or _find_end(backend, path)
            return Tokenizer(backend, end_of_document=end, beside=beside)


@contextlib.contextmanager
def _panics_are_errors(what: str) -> Iterator[None]:
    """Raise a DataError if the library, written in Rust, panics: a panic is not an `Exception` and would not
    be caught elsewhere."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: the tokenizers library fails with {error}; download the tokenizer again") from error


def _check_ids(text: str, name: str) -> None:
    """Check that no id is so large that the library, which stores a table of ids, would kill the process out
    of memory.

    Raises:
        DataError: An id is too large; other errors of the file are reported by the library.
    """
    try:
        read = json_reader.parse(text)
        added = [token["id"] for token in read.get("added_tokens") or ()]
        vocabulary = read["model"]["vocab"]
        ids = [*added, *(vocabulary.values() if isinstance(vocabulary, dict) else ())]
        largest = max((one for one in ids if isinstance(one, int | float)), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        return
    if not largest < LARGEST_VOCABULARY:
        raise DataError(
            f"{name} has a token of the id {largest:,}; expected ids below {LARGEST_VOCABULARY:,}: it is damaged"
        )


def _check_added(text: str, backend: tokenizers.Tokenizer, name: str) -> None:
    """Check that added tokens have the file's ids, which are rows of a model's embeddings.

    The library renumbers them consecutively if the file's ids have a gap or another order.

    Raises:
        DataError: The ids of added tokens differ.
    """
    for token in json_reader.parse(text).get("added_tokens") or ():
        actual_id = backend.token_to_id(token["content"])
        if actual_id != token["id"]:
            raise DataError(
                f"{name} assigns the added token {token['content']!r} the id {token['id']}, but the tokenizers library "
                f"{tokenizers.__version__} assigns {actual_id}, so a model would see another token. Added tokens need "
                f"consecutive ids, in the file's order: renumber them, and fill gaps with unused tokens"
            )


_OTHER_FORMS = {
    "tokenizer.model": "SentencePiece",
    "spiece.model": "SentencePiece",
    "tekken.json": "Mistral's tekken",
    "tiktoken.model": "tiktoken",
    "vocab.json": "the older files of a byte-pair encoding",
    "vocab.txt": "the older file of WordPiece",
}


def _in_folder(folder: Path) -> Path:
    """Return the path of the tokenizer.json in a folder.

    Raises:
        DataError: The folder holds a tokenizer in another format.
    """
    path = folder / "tokenizer.json"
    if path.exists():
        return path
    other = next((name for name in _OTHER_FORMS if (folder / name).exists()), None)
    other = other or next((file.name for file in sorted(folder.glob("*.tiktoken"))), None)
    if other is None:
        return path
    form = _OTHER_FORMS.get(other, "tiktoken")
    raise DataError(
        f"{folder} holds {other} ({form}) and no tokenizer.json, the one form that is read; convert it with transformers: "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )


def _find_end(backend: tokenizers.Tokenizer, path: Path) -> str:
    for token in _KNOWN_ENDS:
        if backend.token_to_id(token) is not None:
            return token
    specials = ", ".join(repr(token.content) for token in backend.get_added_tokens_decoder().values())
    raise DataError(
        f"{path}: no file states the token that ends a document; name it with end_of_document=; its special tokens "
        f"are: {specials or 'none'}"
    )
