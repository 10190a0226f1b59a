"""Text data of a recipe: its config, and the training and held-out sources that opening it returns."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from panax.core.errors import DataError, RecipeError
from panax.core.validation import Validated

from ..files.cache import cache_directory
from ..files.skipped_files import describe_skipped_corpus_files
from ..mixtures.mixture import Mixture
from ..mixtures.mixture_source import ConcatRows, MixedSource, derive_part_seed
from ..teacher.stored_teacher import load_teacher, read_facts
from ..teacher.teacher_rows import TeacherRows, teacher_leaves
from .corpus import PythonLibrary
from .filtered_corpus import FilteredCorpus, PlainCorpus
from .grouped import GroupedRows, find_grouped, group_size
from .packing import Documents, PackedRows, PackedRowSource, PaddedRows, permutation
from .record_checks import RecordLimits
from .row_lengths import describe_lengths, describe_skipped_documents
from .text_bytes import bytes_per_target
from .token_file import TokenFile
from .token_source import TEXT_LEAVES, PackedSource
from .tokenization import open_corpora
from .tokenizer import BytePairTokenizer, PretrainedTokenizer, Progress, Tokenizer
from .tokens import TokenStore


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData(Validated):
    """Text to train on: the corpus, its tokenizer, and how tokens are batched.

    Attributes:
        corpus: The documents: one corpus, or a `Mixture` of several.
        tokenizer: An existing tokenizer, or one to train on the corpus. For a `TokenFile`, which is already
            tokenized, the tokenizer that was used, or None. A mixture has one tokenizer, trained on all its
            parts.
        sequence_length: Maximum number of tokens in a row.
        batch_size: Rows of a global batch, over all devices.
        seed: Seed of the order.
        held_out: Documents held out from training: a fraction if below 1, else a number, 0 for none. The
            choice depends on the corpus only, so that runs with different seeds are evaluated on the same
            documents, and resuming from a checkpoint with another seed does not train on them. Of a mixture,
            taken from each part.
        packing: Fill each row with documents up to `sequence_length`; else each row is one document, truncated to
            this length.
        buckets: Without packing, the sequence lengths that a batch may have, ascending; `sequence_length` is
            always included.
        max_characters: A longer document (prompt and text together) is a bad record. None: no limit.
        max_bad_records: Up to this many unusable records of a corpus are skipped and recorded; more are an
            error.
        teacher: A folder with a teacher's most likely tokens, as `panax.add_teacher` writes it, for `models.Distill`.
        cache_dir: Directory of tokenized corpora. None: $PANAX_CACHE, else ~/.cache/panax.
    """

    corpus: PlainCorpus | FilteredCorpus | Mixture = dataclasses.field(default_factory=PythonLibrary)
    tokenizer: BytePairTokenizer | PretrainedTokenizer | None = dataclasses.field(default_factory=BytePairTokenizer)
    sequence_length: int = 1024
    batch_size: int = 8
    seed: int = 0
    held_out: float | int = 0.02
    packing: bool = True
    buckets: tuple[int, ...] = ()
    max_characters: int | None = None
    max_bad_records: int = 0
    teacher: str | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("sequence_length", 1), ("batch_size", 1), ("max_characters", 1), ("max_bad_records", 0)):
            if getattr(self, name) is not None and getattr(self, name) < least:
                raise RecipeError(f"{name}={getattr(self, name)}; expected at least {least}")
        if not 0 <= self.held_out < float("inf") or (self.held_out > 1 and self.held_out != int(self.held_out)):
            raise RecipeError(f"held_out={self.held_out}; expected a fraction below 1, or a whole number of documents")
        if self.buckets and self.packing:
            raise RecipeError(f"buckets={self.buckets} has no effect with packing; remove it, or set packing=False")
        if list(self.buckets) != sorted(set(self.buckets)) or any(
            not 0 < b <= self.sequence_length for b in self.buckets
        ):
            expected = f"rising lengths from 1 to sequence_length={self.sequence_length}"
            raise RecipeError(f"buckets={self.buckets}; expected {expected}")
        are_tokens = [isinstance(corpus, TokenFile) for corpus in self._corpora().values()]
        if any(are_tokens) and isinstance(self.tokenizer, BytePairTokenizer):
            raise RecipeError(
                "a TokenFile holds tokens, so no tokenizer can be trained on it; name the one that made it with "
                "tokenizer=PretrainedTokenizer(path=...), or set tokenizer=None"
            )
        parts = self._corpora()
        grouped = [name for name, corpus in parts.items() if find_grouped(corpus) is not None]
        if grouped and len(parts) > 1:
            raise RecipeError(
                f"part {grouped[0]!r} of the mixture is a {type(parts[grouped[0]]).__name__}, which trains alone; name all its "
                f"files in one, in place of the mixture"
            )
        if self.teacher is not None and (len(parts) > 1 or grouped):
            raise RecipeError(
                "data.teacher is of the documents of one corpus, and data.corpus is a "
                f"{type(self.corpus).__name__}; remove it, or train on one corpus"
            )
        if self.tokenizer is None and not all(are_tokens):
            raise RecipeError("tokenizer=None; a corpus of text needs one, for example BytePairTokenizer()")

    @property
    def has_groups(self) -> bool:
        """True if documents belong together, such as the answers of a pair."""
        return any(find_grouped(corpus) is not None for corpus in self._corpora().values())

    def open(self, *, progress: Progress | None = None) -> "OpenedText":
        """Tokenize the corpus, or load it from the cache, and build the sources.

        Args:
            progress: Called while tokenizing with the current activity and the numbers of documents and
                tokens so far.

        Raises:
            DataError: The corpus can't be read, is empty, or has too few documents for `held_out`.
        """
        corpora = self._corpora()
        limits = RecordLimits(max_characters=self.max_characters, max_bad_records=self.max_bad_records)
        root = cache_directory(self.cache_dir)
        tokenizer, stores = open_corpora(list(corpora.values()), self.tokenizer, root, progress, limits)
        parts = {
            name: OpenedPart(*split(store, self.held_out, group=group_size(corpus)))
            for (name, corpus), store in zip(corpora.items(), stores, strict=True)
        }
        return OpenedText(
            train=self._train(parts),
            held_out=self._held_out(parts) if self.held_out else None,
            tokenizer=tokenizer,
            vocab_size=max(store.vocab_size for store in stores) if tokenizer is None else tokenizer.vocab_size,
            parts=parts,
            notes=() if tokenizer is None else self._notes(tokenizer),
            account=self._account(corpora, parts),
            has_groups=self.has_groups,
        )

    def _account(
        self, corpora: Mapping[str, PlainCorpus | FilteredCorpus], parts: Mapping[str, "OpenedPart"]
    ) -> tuple[str, ...]:
        lines: list[str] = []
        for name, part in parts.items():
            of_part = f"part {name!r}: " if name else ""
            files = describe_skipped_corpus_files(corpora[name])
            notes = (
                *files,
                *describe_skipped_documents(part.training.store),
                *self._special_note(part),
                *self._notes_of_lengths(part, name),
            )
            lines += [f"{of_part}{line}" for line in notes]
        return tuple(lines)

    def _special_note(self, part: "OpenedPart") -> Iterator[str]:
        """Yield a note if plain texts spell special tokens, which are then encoded as ordinary characters."""
        count, documents = part.training.store.num_with_special_tokens, len(part.training.store.offsets) - 1
        if count and part.training.store.end_of_document is not None:
            yield (
                f"{count:,} of {documents:,} documents spell special tokens of the tokenizer, which are encoded as the "
                f"characters they are; conversations are read by Chats, which applies the chat template"
            )
        elif count:
            yield (
                f"the messages of {count:,} of {documents:,} conversations spell special tokens, which are encoded as such, as "
                f"in transformers: a template that was applied before would be applied twice"
            )

    def _notes_of_lengths(self, part: "OpenedPart", name: str) -> Iterator[str]:
        """Yield notes on how the documents fit into rows.

        Raises:
            DataError: No target with loss remains.
        """
        for documents, which in ((part.training, "documents"), (part.held_out, "held-out documents")):
            if documents is None:
                continue
            rows = self._rows(documents, name)
            if not isinstance(rows, PackedRows | PaddedRows):
                yield rows.describe(which.replace("documents", "pairs"))
                continue
            yield describe_lengths(rows, documents, which, self.batch_size)
            if (
                isinstance(rows, PaddedRows)
                and rows.num_documents_without_loss == rows.num_rows
                and documents is part.training
            ):
                raise DataError(
                    f"nothing is left to train on: {describe_lengths(rows, documents, which, self.batch_size)}. "
                    "Raise sequence_length "
                    f"above the length of the prompts, or shorten them"
                )

    def _notes(self, tokenizer: Tokenizer) -> tuple[str, ...]:
        if not tokenizer.start_of_document or all(isinstance(corpus, TokenFile) for corpus in self._corpora().values()):
            return ()
        start = tokenizer.decode(tokenizer.start_of_document)
        return (
            f"each document begins with {start!r}, which the tokenizer's post-processor adds, as in transformers; "
            f"data.tokenizer.add_bos=False omits it",
        )

    @property
    def leaves(self) -> Mapping[str, Any]:
        """Names and dtypes of a batch's leaves, each (batch, seq); dtypes with a shape have it in addition."""
        corpus = find_grouped(next(iter(self._corpora().values())))
        leaves = TEXT_LEAVES if corpus is None else corpus.leaves
        return leaves if self.teacher is None else {**leaves, **teacher_leaves(read_facts(self.teacher).top_k)}

    def _corpora(self) -> Mapping[str, PlainCorpus | FilteredCorpus]:
        """Return the corpora by the names of the mixture's parts; a single corpus has the name ""."""
        if isinstance(self.corpus, Mixture):
            return {part.name: part.corpus for part in self.corpus.parts}
        return {"": self.corpus}

    def _train(self, parts: Mapping[str, "OpenedPart"]) -> PackedSource | MixedSource:
        rows = [self._rows(part.training, name) for name, part in parts.items()]
        if isinstance(self.corpus, Mixture):
            return MixedSource(self.corpus, rows, batch_size=self.batch_size, seed=self.seed)
        return PackedSource(self._with_teacher(rows[0], next(iter(parts.values()))), batch_size=self.batch_size)

    def _held_out(self, parts: Mapping[str, "OpenedPart"]) -> PackedSource:
        rows = [self._rows(part.held_out, name) for name, part in parts.items() if part.held_out is not None]
        first = self._with_teacher(rows[0], next(iter(parts.values())))
        judged = first if len(rows) == 1 else ConcatRows(rows, seed=self.seed)
        return PackedSource(judged, batch_size=self.batch_size, epochs=1)

    def _with_teacher(self, rows: PackedRows | PaddedRows | GroupedRows, part: "OpenedPart") -> PackedRowSource:
        if self.teacher is None:
            return rows
        assert isinstance(rows, PackedRows | PaddedRows)
        return TeacherRows(rows, load_teacher(self.teacher, part.training.store))

    def _rows(self, documents: Documents, name: str) -> PackedRows | PaddedRows | GroupedRows:
        seed = derive_part_seed(self.seed, name) if name else self.seed
        corpus = find_grouped(self._corpora()[name])
        if corpus is not None:
            return corpus.make_rows(documents, self, seed)
        if self.packing:
            return PackedRows(documents, sequence_length=self.sequence_length, seed=seed)
        return PaddedRows(documents, sequence_length=self.sequence_length, seed=seed, buckets=self.buckets)


class OpenedPart(NamedTuple):
    """The documents of one corpus, split.

    Attributes:
        training: Documents to train on.
        held_out: Documents held out; None if there are none.
    """

    training: Documents
    held_out: Documents | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpenedText:
    """An open corpus, or mixture.

    Attributes:
        train: Endless batches (finite if every part of a mixture is), which resume exactly.
        held_out: One pass over the held-out documents, its last batch padded; None if there are none.
        tokenizer: The tokenizer; None for a token file opened without one.
        vocab_size: One more than the largest id: the minimum vocabulary size of a model.
        parts: The documents, by the name of the part; a single corpus has the name "".
        notes: Notes for the user on the tokenization.
        account: Lines on the files and documents read, how they fit into rows, and what is skipped or
            truncated.
        has_groups: True if documents belong together, so that a loss is not one of each target.
    """

    train: PackedSource | MixedSource
    held_out: PackedSource | None
    tokenizer: Tokenizer | None
    vocab_size: int
    parts: Mapping[str, OpenedPart]
    notes: tuple[str, ...] = ()
    account: tuple[str, ...] = ()
    has_groups: bool = False

    @property
    def training_documents(self) -> Documents:
        """Return the documents of `train`, if they are of one corpus."""
        (part,) = self.parts.values()
        return part.training

    @property
    def held_out_documents(self) -> Documents | None:
        """Return the documents of `held_out`, if they are of one corpus."""
        (part,) = self.parts.values()
        return part.held_out

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in one training epoch, with the ends of documents; for a mixture, in
        one epoch of every part."""
        return sum(part.training.num_tokens for part in self.parts.values())

    @functools.cached_property
    def unigram_entropy_nats(self) -> float:
        """Compute the held-out loss per target of a unigram model of the training tokens (add-one smoothing),
        in nats.

        A model that does not get below this has learnt nothing about order. Without held-out documents it is
        measured on the training text. The parts of a mixture count by size, not by weight. NaN if no target
        carries loss, or the documents belong together.
        """
        if self.has_groups:
            return math.nan
        counts, judged = np.zeros((2, self.vocab_size), np.int64)
        for part in self.parts.values():
            every = part.training.store.target_counts
            held_out_counts = every if part.held_out is None else _count_targets(part.held_out)
            counts[: len(every)] += every if part.held_out is None else every - held_out_counts
            judged[: len(held_out_counts)] += held_out_counts
        # A document that was split in two has one more target than its halves together, hence the floor at 0.
        smoothed = np.maximum(counts, 0) + 1.0
        return float(-(judged @ np.log(smoothed / smoothed.sum())) / judged.sum()) if judged.any() else math.nan

    @functools.cached_property
    def bytes_per_target(self) -> float | None:
        """Return the UTF-8 bytes of text per held-out target, or per training target if nothing is held out;
        None without a tokenizer.

        It converts a loss to bits per byte, which is comparable between tokenizers.
        """
        if self.tokenizer is None or self.has_groups:
            return None
        parts = self.parts.values()
        judged = [part.held_out for part in parts if part.held_out is not None] or [part.training for part in parts]
        return bytes_per_target(judged, self.tokenizer)


def split(store: TokenStore, held_out: float | int, *, group: int = 1) -> tuple[Documents, Documents | None]:
    """Split the documents into training and held-out ones; a single document is split near its end.

    Args:
        store: The token file.
        held_out: A fraction if below 1, of at least one document; else a number; 0 for none.
        group: Number of adjacent documents that stay together; `held_out` then counts groups.

    Raises:
        DataError: Nothing would be left to train on.
    """
    store.check()
    starts, lengths = store.offsets[:-1], np.diff(store.offsets)

    def documents(part: str, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Documents:
        name = f"{store.content}-{part}"
        return Documents(store=store, starts=starts, lengths=lengths, fingerprint=name)

    if held_out == 0:
        return documents("all", starts, lengths), None
    if len(starts) == 1 and held_out < 1:
        kept = max(round(int(lengths[0]) * held_out), 2)
        if kept >= lengths[0]:
            raise DataError(f"the one document has {lengths[0]} tokens; too few to hold some out: set held_out=0")
        first = lengths - kept
        return documents(f"without-last-{kept}", starts, first), documents(
            f"last-{kept}", starts + first, lengths - first
        )
    total = len(starts) // group
    count = max(round(total * held_out), 1) if held_out < 1 else int(held_out)
    if count >= total:
        what = "documents" if group == 1 else f"groups of {group} documents"
        raise DataError(
            f"held_out={held_out} keeps {count} of {total} {what} from training; expected fewer: lower it, "
            "or set held_out=0"
        )
    order = permutation(total, seed=0, epoch=0, purpose="held_out")
    kept, rest = (
        (np.sort(part)[:, None] * group + np.arange(group)).reshape(-1) for part in (order[:count], order[count:])
    )
    return (
        documents(f"without-{count}", starts[rest], lengths[rest]),
        documents(f"held-out-{count}", starts[kept], lengths[kept]),
    )


def _count_targets(documents: Documents) -> npt.NDArray[np.int64]:
    store = documents.store
    counts = np.zeros_like(store.target_counts)
    pairs = zip(documents.starts.tolist(), documents.lengths.tolist(), strict=True)
    while block := list(itertools.islice(pairs, 4096)):
        store.check()
        targets = [slice(start + 1, start + length) for start, length in block]
        ids = np.concatenate([store.tokens[target] for target in targets])
        if store.loss_mask is not None:
            ids = ids[np.concatenate([store.loss_mask[target] for target in targets]) != 0]
        counts += np.bincount(ids, minlength=len(counts))
    return counts
