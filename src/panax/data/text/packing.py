"""Rows of tokens as a pure function of (seed, epoch, index): documents packed without gaps, or one document a row.

Packed: the documents of an epoch, in an order drawn from the seed, are one long stream, cut into windows of the
sequence length; the windows are then permuted too, so that a batch is not one long document. Each token is in exactly
one window of an epoch. The last window is filled up with padding.

Any row can be made at any time in any order from O(documents) memory, so order can't depend on devices or processes.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .tokens import TokenStore

_PURPOSES = {"documents": 0, "windows": 1, "held_out": 2}
_PIECE_TOKENS = 64
"""Pieces of more tokens than this, on average, are copied one by one; shorter ones are gathered by index."""


def permutation(
    n: int, *, seed: int, epoch: int, purpose: Literal["documents", "windows", "held_out"]
) -> npt.NDArray[np.int64]:
    """A permutation of `n` that depends on its arguments alone.

    It sorts the raw output of a counter-based generator, which NumPy guarantees to stay the same between versions, as
    it does not for `Generator.permutation`.

    >>> permutation(8, seed=0, epoch=0, purpose="documents").tolist()
    [0, 2, 1, 5, 4, 3, 6, 7]
    """
    key = np.array([seed % 2**64, epoch * len(_PURPOSES) + _PURPOSES[purpose]], np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(n), kind="stable")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Documents:
    """Some of a token file's documents.

    Attributes:
        store: The token file.
        starts: Where each document begins in it, in tokens.
        lengths: How long each is, in tokens, its end included; at least 1.
        fingerprint: A hash of which documents of which content these are.
    """

    store: TokenStore
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    fingerprint: str

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


class PackedRow(NamedTuple):
    """One row, without its padding: five arrays of equal length.

    Attributes:
        tokens: Ids.
        targets: The next id in the same document; 0 where there is none.
        loss_mask: 1 where the target exists and carries loss, else 0.
        segment: Which document of the row, from 1.
        position: How far into that document's part of the row, from 0.
    """

    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.float32]
    segment: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]


@runtime_checkable
class PackedRowSource(Protocol):
    """What a source of token batches draws from.

    Attributes:
        seed: What the order depends on.
        num_rows: Rows in an epoch, the same in each.
        sequence_length: The most tokens a row holds.
        fingerprint: A hash of everything but the seed that decides what row i of an epoch is.
        starts: Where each document begins in its token file, in tokens.
    """

    seed: int
    num_rows: int
    sequence_length: int
    fingerprint: str
    starts: npt.NDArray[np.int64]

    def row(self, epoch: int, index: int) -> PackedRow: ...

    def read_rows(self, epoch: int, indices: npt.NDArray[np.int64], width: int) -> PackedRow:
        """Rows `indices` of an epoch at once: five arrays (row, width), zero where a row has ended."""
        ...

    def width(self, epoch: int, indices: npt.NDArray[np.int64]) -> int:
        """The length, in tokens, of rows `indices` when they are in one batch."""
        ...

    def document_counts(self, epoch: int, index: int) -> npt.NDArray[np.int64]:
        """How often each document has been seen to its end, by whoever has taken all rows before row `index` of `epoch`."""
        ...


class PackedRows:
    """Windows of exactly `sequence_length` tokens (the epoch's last may be shorter); documents may be cut by them.

    Attributes:
        tokenizers: Fingerprints of what made the ids, where it is known.
    """

    def __init__(self, documents: Documents, *, sequence_length: int, seed: int) -> None:
        self.seed = seed
        self.sequence_length = sequence_length
        self.num_rows = -(-documents.num_tokens // sequence_length)
        self.fingerprint = f"{documents.fingerprint}-packed-{sequence_length}"
        self.tokenizers = frozenset({documents.store.tokenizer} - {""})
        self.starts = documents.starts
        self._documents = documents
        self._latest: _Epoch | None = None

    def row(self, epoch: int, index: int) -> PackedRow:
        begin = int(self._stream(epoch).windows[index]) * self.sequence_length
        width = min(self.sequence_length, self._documents.num_tokens - begin)
        return _first(self.read_rows(epoch, np.array([index]), width))

    def read_rows(self, epoch: int, indices: npt.NDArray[np.int64], width: int) -> PackedRow:
        self._documents.store.check()
        stream = self._stream(epoch)
        begins = stream.windows[indices] * self.sequence_length
        ends = np.minimum(begins + self.sequence_length, stream.ends[-1])
        first = np.searchsorted(stream.ends, begins, side="right")
        num_pieces = np.searchsorted(stream.ends, ends - 1, side="right") - first + 1
        row = np.repeat(np.arange(len(indices)), num_pieces)
        number = np.arange(len(row)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
        place = first[row] + number
        document, stream_end = stream.order[place], stream.ends[place]
        stream_start = stream_end - self._documents.lengths[document]
        begin = np.maximum(stream_start, begins[row])
        end = np.minimum(stream_end, ends[row])
        pieces = _Pieces(
            row=row,
            offset=begin - begins[row],
            segment=number + 1,
            start=self._documents.starts[document] + (begin - stream_start),
            length=end - begin,
            whole=stream_end <= ends[row],
        )
        return _gather(self._documents.store, pieces, (len(indices), width))

    def width(self, epoch: int, indices: npt.NDArray[np.int64]) -> int:
        return self.sequence_length

    def document_counts(self, epoch: int, index: int) -> npt.NDArray[np.int64]:
        stream = self._stream(epoch)
        taken = np.zeros(self.num_rows, np.int64)
        taken[stream.windows[:index]] = 1
        before = np.concatenate([[0], np.cumsum(taken)])  # windows taken before each in the stream
        first = (stream.ends - self._documents.lengths[stream.order]) // self.sequence_length
        last = (stream.ends - 1) // self.sequence_length
        times = np.full(len(stream.order), epoch)
        times[stream.order] += before[last + 1] - before[first] == last + 1 - first
        return times

    def _stream(self, epoch: int) -> "_Epoch":
        # Replaced as a whole, so that a thread that still draws ahead can't meet half of another epoch.
        latest = self._latest
        if latest is None or latest.epoch != epoch:
            lengths = self._documents.lengths
            order = permutation(len(lengths), seed=self.seed, epoch=epoch, purpose="documents")
            windows = permutation(self.num_rows, seed=self.seed, epoch=epoch, purpose="windows")
            latest = self._latest = _Epoch(epoch, order, np.cumsum(lengths[order]), windows)
        return latest


class _Epoch(NamedTuple):
    """One epoch's order of documents, where each ends in the stream they make, and its order of windows."""

    epoch: int
    order: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    windows: npt.NDArray[np.int64]


class PaddedRows:
    """One document a row, cut off after `sequence_length` tokens; a batch is as long as its longest row needs.

    Attributes:
        num_truncated_documents: How many documents are longer than `sequence_length`.
        num_truncated_tokens: How many tokens are never seen because of that.
        tokenizers: Fingerprints of what made the ids, where it is known.
    """

    def __init__(self, documents: Documents, *, sequence_length: int, seed: int, buckets: tuple[int, ...] = ()) -> None:
        """Take rows from `documents`.

        Args:
            sequence_length: The most tokens a row holds.
            seed: What the order depends on.
            buckets: The lengths that a batch may have, rising; `sequence_length` is always one.
        """
        self.seed = seed
        self.sequence_length = sequence_length
        self.num_rows = len(documents.starts)
        self.fingerprint = f"{documents.fingerprint}-padded-{sequence_length}"
        self.tokenizers = frozenset({documents.store.tokenizer} - {""})
        self.starts = documents.starts
        beyond = np.maximum(documents.lengths - sequence_length, 0)
        self.num_truncated_documents = int(np.count_nonzero(beyond))
        self.num_truncated_tokens = int(beyond.sum())
        self._buckets = np.array([*buckets, sequence_length])
        self._documents = documents
        self._latest: tuple[int, npt.NDArray[np.int64]] | None = None

    def row(self, epoch: int, index: int) -> PackedRow:
        length = int(self._documents.lengths[self._order(epoch)[index]])
        return _first(self.read_rows(epoch, np.array([index]), min(length, self.sequence_length)))

    def read_rows(self, epoch: int, indices: npt.NDArray[np.int64], width: int) -> PackedRow:
        self._documents.store.check()
        document = self._order(epoch)[indices]
        length = self._documents.lengths[document]
        taken = np.minimum(length, self.sequence_length)
        pieces = _Pieces(
            row=np.arange(len(indices)),
            offset=np.zeros(len(indices), np.int64),
            segment=np.ones(len(indices), np.int64),
            start=self._documents.starts[document],
            length=taken,
            whole=taken == length,
        )
        return _gather(self._documents.store, pieces, (len(indices), width))

    def width(self, epoch: int, indices: npt.NDArray[np.int64]) -> int:
        longest = self._documents.lengths[self._order(epoch)[indices]].max(initial=1)
        return int(self._buckets[np.searchsorted(self._buckets, min(int(longest), self.sequence_length))])

    def document_counts(self, epoch: int, index: int) -> npt.NDArray[np.int64]:
        times = np.full(self.num_rows, epoch)
        times[self._order(epoch)[:index]] += 1
        return times

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        latest = self._latest
        if latest is None or latest[0] != epoch:
            latest = self._latest = epoch, permutation(self.num_rows, seed=self.seed, epoch=epoch, purpose="documents")
        return latest[1]

    @functools.cached_property
    def num_documents_without_loss(self) -> int:
        """How many documents keep nothing that carries loss: of a prompt that fills the row, the answer is cut away."""
        return _count_without_loss(self._documents, self.sequence_length)

    def fill_ratio(self, batch_size: int) -> float:
        """Which share of the positions of the first epoch's batches holds tokens."""
        lengths = np.minimum(self._documents.lengths[self._order(0)], self.sequence_length)
        longest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), batch_size))
        widths = self._buckets[np.searchsorted(self._buckets, longest)]
        rows = np.diff(np.append(np.arange(0, len(lengths), batch_size), len(lengths)))
        return float(lengths.sum() / (widths * rows).sum())


def _count_without_loss(documents: Documents, sequence_length: int) -> int:
    """How many documents have no target with loss in their first `sequence_length` positions."""
    store = documents.store
    # The target of a cut document's last position stands behind the row; a whole document's last token has none.
    targets = np.minimum(documents.lengths - 1, sequence_length)
    if store.loss_mask is None:
        return int(np.count_nonzero(targets == 0))
    # An answer stands behind its prompt: most documents are known by their last target.
    last = documents.starts + targets
    unclear = np.flatnonzero((targets == 0) | (store.loss_mask[last] == 0))
    without = 0
    for document in unclear.tolist():
        first = int(documents.starts[document]) + 1
        without += not store.loss_mask[first : first + int(targets[document])].any()
    return without


class _Pieces(NamedTuple):
    """Runs of tokens that lie together both in the token file and in a row, in the order of rows and of offsets in them.

    Attributes:
        row: Which row each is in.
        offset: Where it begins in the row.
        segment: Which piece of the row it is, from 1.
        start: Where it begins in the token file.
        length: In tokens; at least 1.
        whole: Whether its document ends with it.
    """

    row: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    segment: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    whole: npt.NDArray[np.bool_]


def _first(rows: PackedRow) -> PackedRow:
    return PackedRow(rows.tokens[0], rows.targets[0], rows.loss_mask[0], rows.segment[0], rows.position[0])


def _gather(store: TokenStore, pieces: _Pieces, shape: tuple[int, int]) -> PackedRow:
    """Rows from their pieces, all at once: each leaf is written in a few passes, whatever the number of rows."""
    size = shape[0] * shape[1]
    place = pieces.row * shape[1] + pieces.offset
    last = place + pieces.length - 1
    run = np.diff(place, append=size)  # each piece, and the padding after it, if any
    num_tokens = int(pieces.length.sum())
    copy = _copy_pieces if len(place) * _PIECE_TOKENS < num_tokens else _copy_by_index
    # The target of a piece's last token stands in the file, outside of the row; of a document's last there is none.
    following = np.where(pieces.whole, 0, pieces.start + pieces.length)
    tokens = copy(store.tokens, pieces, place, run, np.int32)
    targets = np.empty(size, np.int32)
    targets[:-1] = tokens[1:]
    targets[last] = np.where(pieces.whole, 0, store.tokens[following])
    if store.loss_mask is None:
        loss_mask = np.ones(size, np.float32)
    else:
        loss_mask = np.empty(size, np.float32)
        loss_mask[:-1] = copy(store.loss_mask, pieces, place, run, np.float32)[1:] != 0
        loss_mask[last] = store.loss_mask[following] != 0
    loss_mask[last[pieces.whole]] = 0
    position = np.arange(size, dtype=np.int32)
    position -= np.repeat(place.astype(np.int32), run)
    made = PackedRow(
        tokens.reshape(shape),
        targets.reshape(shape),
        loss_mask.reshape(shape),
        np.repeat(pieces.segment.astype(np.int32), run).reshape(shape),
        position.reshape(shape),
    )
    if num_tokens < size:
        padding = made.position >= np.repeat(pieces.length.astype(np.int32), run).reshape(shape)
        for leaf in made:
            leaf[padding] = 0
    return made


def _copy_pieces(
    source: np.ndarray, pieces: _Pieces, place: npt.NDArray[np.int64], run: npt.NDArray[np.int64], dtype: type
) -> np.ndarray:
    """One copy for each piece; what lies between pieces is left as it is found."""
    out = np.zeros(int(run.sum()), dtype)
    for start, length, to in zip(pieces.start.tolist(), pieces.length.tolist(), place.tolist(), strict=True):
        out[to : to + length] = source[start : start + length]
    return out


def _copy_by_index(
    source: np.ndarray, pieces: _Pieces, place: npt.NDArray[np.int64], run: npt.NDArray[np.int64], dtype: type
) -> np.ndarray:
    """One lookup for all; between pieces stands whatever follows them in the file."""
    here = np.arange(int(run.sum()))
    here += np.repeat(pieces.start - place, run)
    return source.take(here, mode="clip").astype(dtype)
