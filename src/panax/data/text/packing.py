"""Rows of tokens as a pure function of (seed, epoch, index): documents packed without gaps, or one document
per row.

Packed: the documents of an epoch, in an order drawn from the seed, are one long stream, cut into windows of
the sequence length; the windows are then permuted too, so that a batch is not one long document. Each token
is in exactly one window of an epoch. The last window is padded.

Any row can be computed at any time from O(documents) memory, so that the order does not depend on devices or
processes.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .tokens import TokenStore

_PURPOSES = {"documents": 0, "windows": 1, "held_out": 2}
_PIECE_TOKENS = 64
"""Pieces with more tokens than this, on average, are copied one by one; shorter ones are gathered by
index."""


def permutation(
    n: int, *, seed: int, epoch: int, purpose: Literal["documents", "windows", "held_out"]
) -> npt.NDArray[np.int64]:
    """Return a permutation of `n` that depends only on its arguments.

    It sorts the raw output of a counter-based generator, which NumPy guarantees to be the same in all
    versions, unlike `Generator.permutation`.

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
        starts: Offset of each document in the token file, in tokens.
        lengths: Length of each document in tokens, including its end; at least 1.
        fingerprint: A hash of the selection of documents and of their content.
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
        targets: The next id in the same document; 0 if there is none.
        loss_mask: 1 if the target exists and carries loss, else 0.
        segment: Index of the document in the row, from 1.
        position: Position within that document's part of the row, from 0.
    """

    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.float32]
    segment: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]


class RowArrays(Protocol):
    """Arrays of rows by name: a `PackedRow`, which may have further leaves."""

    def _asdict(self) -> dict[str, Any]: ...


@runtime_checkable
class PackedRowSource(Protocol):
    """Interface of the rows that a source of token batches draws from.

    Attributes:
        seed: Seed of the order.
        num_rows: Rows in an epoch, the same in each.
        sequence_length: Maximum number of tokens in a row.
        fingerprint: A hash of everything except the seed that determines row i of an epoch.
        starts: Offset of each document in its token file, in tokens.
    """

    seed: int
    num_rows: int
    sequence_length: int
    fingerprint: str
    starts: npt.NDArray[np.int64]

    def row(self, epoch: int, index: int) -> PackedRow: ...

    def read_rows(self, epoch: int, indices: npt.NDArray[np.int64], width: int) -> RowArrays:
        """Read rows `indices` of an epoch at once: arrays (row, width), zero after the end of a row."""
        ...

    def width(self, epoch: int, indices: npt.NDArray[np.int64]) -> int:
        """Return the width, in tokens, of a batch of rows `indices`."""
        ...

    def document_counts(self, epoch: int, index: int) -> npt.NDArray[np.int64]:
        """Count how often each document has been seen to its end, after all rows before row `index` of
        `epoch`."""
        ...


class PackedRows:
    """Windows of exactly `sequence_length` tokens (the epoch's last may be shorter); documents may span
    windows.

    Attributes:
        tokenizers: Fingerprints of the tokenizers that made the ids, if known.
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
        return gather_pieces(self._documents.store, self._pieces(epoch, indices), (len(indices), width))

    def target_indices(self, epoch: int, indices: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
        """Return the index of each position's target in the token file, of shape (row, width); -1 without a target."""
        return find_targets(self._pieces(epoch, indices), (len(indices), width))

    def _pieces(self, epoch: int, indices: npt.NDArray[np.int64]) -> "Pieces":
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
        return Pieces(
            row=row,
            offset=begin - begins[row],
            segment=number + 1,
            start=self._documents.starts[document] + (begin - stream_start),
            length=end - begin,
            ends_document=stream_end <= ends[row],
        )

    def width(self, epoch: int, indices: npt.NDArray[np.int64]) -> int:
        return self.sequence_length

    def document_counts(self, epoch: int, index: int) -> npt.NDArray[np.int64]:
        stream = self._stream(epoch)
        used_windows = np.zeros(self.num_rows, np.int64)
        used_windows[stream.windows[:index]] = 1
        before = np.concatenate([[0], np.cumsum(used_windows)])  # windows taken before each window of the stream
        first = (stream.ends - self._documents.lengths[stream.order]) // self.sequence_length
        last = (stream.ends - 1) // self.sequence_length
        times = np.full(len(stream.order), epoch)
        times[stream.order] += before[last + 1] - before[first] == last + 1 - first
        return times

    def _stream(self, epoch: int) -> "_Epoch":
        # Replaced as a whole, so that a thread that still prefetches never sees a mix of two epochs.
        latest = self._latest
        if latest is None or latest.epoch != epoch:
            lengths = self._documents.lengths
            order = permutation(len(lengths), seed=self.seed, epoch=epoch, purpose="documents")
            windows = permutation(self.num_rows, seed=self.seed, epoch=epoch, purpose="windows")
            latest = self._latest = _Epoch(epoch, order, np.cumsum(lengths[order]), windows)
        return latest


class _Epoch(NamedTuple):
    """Order of documents in one epoch, the end of each in their concatenated stream, and the order of
    windows."""

    epoch: int
    order: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    windows: npt.NDArray[np.int64]


class PaddedRows:
    """One document per row, truncated after `sequence_length` tokens; a batch is as long as its longest row
    needs.

    Attributes:
        num_truncated_documents: Number of documents longer than `sequence_length`.
        num_truncated_tokens: Number of tokens that are never seen because of that.
        tokenizers: Fingerprints of the tokenizers that made the ids, if known.
    """

    def __init__(self, documents: Documents, *, sequence_length: int, seed: int, buckets: tuple[int, ...] = ()) -> None:
        """Take rows from `documents`.

        Args:
            sequence_length: Maximum number of tokens in a row.
            seed: Seed of the order.
            buckets: The lengths that a batch may have, ascending; `sequence_length` is always included.
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
        return gather_pieces(self._documents.store, self._pieces(epoch, indices), (len(indices), width))

    def target_indices(self, epoch: int, indices: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
        """Return the index of each position's target in the token file, of shape (row, width); -1 without a target."""
        return find_targets(self._pieces(epoch, indices), (len(indices), width))

    def _pieces(self, epoch: int, indices: npt.NDArray[np.int64]) -> "Pieces":
        document = self._order(epoch)[indices]
        length = self._documents.lengths[document]
        kept_lengths = np.minimum(length, self.sequence_length)
        return Pieces(
            row=np.arange(len(indices)),
            offset=np.zeros(len(indices), np.int64),
            segment=np.ones(len(indices), np.int64),
            start=self._documents.starts[document],
            length=kept_lengths,
            ends_document=kept_lengths == length,
        )

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
        """Count documents without any target with loss: if a prompt fills the row, its answer is
        truncated."""
        return _count_without_loss(self._documents, self.sequence_length)

    def fill_ratio(self, batch_size: int) -> float:
        """Return the share of the positions of the first epoch's batches that hold tokens."""
        lengths = np.minimum(self._documents.lengths[self._order(0)], self.sequence_length)
        longest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), batch_size))
        widths = self._buckets[np.searchsorted(self._buckets, longest)]
        rows = np.diff(np.append(np.arange(0, len(lengths), batch_size), len(lengths)))
        return float(lengths.sum() / (widths * rows).sum())


def _count_without_loss(documents: Documents, sequence_length: int) -> int:
    """Count documents that have no target with loss in their first `sequence_length` positions."""
    store = documents.store
    # The target of a truncated document's last position is the token after the row; a complete document's
    # last token has no target.
    targets = np.minimum(documents.lengths - 1, sequence_length)
    if store.loss_mask is None:
        return int(np.count_nonzero(targets == 0))
    # An answer follows its prompt: for most documents the last target decides.
    last = documents.starts + targets
    unclear = np.flatnonzero((targets == 0) | (store.loss_mask[last] == 0))
    without = 0
    for document in unclear.tolist():
        first = int(documents.starts[document]) + 1
        without += not store.loss_mask[first : first + int(targets[document])].any()
    return without


class Pieces(NamedTuple):
    """Runs of tokens that are contiguous both in the token file and in a row, ordered by row and offset.

    Attributes:
        row: Index of its row.
        offset: Its offset in the row.
        segment: Index of the piece in its row, from 1.
        start: Its offset in the token file.
        length: Length in tokens; at least 1.
        ends_document: True if the piece is the end of its document.
    """

    row: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    segment: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    ends_document: npt.NDArray[np.bool_]


def _first(rows: PackedRow) -> PackedRow:
    return PackedRow(rows.tokens[0], rows.targets[0], rows.loss_mask[0], rows.segment[0], rows.position[0])


def gather_pieces(store: TokenStore, pieces: Pieces, shape: tuple[int, int]) -> PackedRow:
    """Assemble rows from their pieces together: each leaf is written in a few passes, regardless of the number of
    rows."""
    size = shape[0] * shape[1]
    destination = pieces.row * shape[1] + pieces.offset
    last = destination + pieces.length - 1
    run = np.diff(destination, append=size)  # each piece, and the padding after it, if any
    num_tokens = int(pieces.length.sum())
    copy = _copy_pieces if len(destination) * _PIECE_TOKENS < num_tokens else _copy_by_index
    # The target of a piece's last token is in the file, outside the row; a document's last token has none.
    following = np.where(pieces.ends_document, 0, pieces.start + pieces.length)
    tokens = copy(store.tokens, pieces, destination, run, np.int32)
    targets = np.empty(size, np.int32)
    targets[:-1] = tokens[1:]
    targets[last] = np.where(pieces.ends_document, 0, store.tokens[following])
    if store.loss_mask is None:
        loss_mask = np.ones(size, np.float32)
    else:
        loss_mask = np.empty(size, np.float32)
        loss_mask[:-1] = copy(store.loss_mask, pieces, destination, run, np.float32)[1:] != 0
        loss_mask[last] = store.loss_mask[following] != 0
    loss_mask[last[pieces.ends_document]] = 0
    position = np.arange(size, dtype=np.int32)
    position -= np.repeat(destination.astype(np.int32), run)
    rows = PackedRow(
        tokens.reshape(shape),
        targets.reshape(shape),
        loss_mask.reshape(shape),
        np.repeat(pieces.segment.astype(np.int32), run).reshape(shape),
        position.reshape(shape),
    )
    if num_tokens < size:
        padding = rows.position >= np.repeat(pieces.length.astype(np.int32), run).reshape(shape)
        for leaf in rows:
            leaf[padding] = 0
    return rows


def find_targets(pieces: Pieces, shape: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Return the index in the token file of each position's target, of this shape of rows; -1 without a target."""
    indices = np.full(shape[0] * shape[1], -1, np.int64)
    before = np.cumsum(pieces.length) - pieces.length
    within = np.arange(int(pieces.length.sum())) - np.repeat(before, pieces.length)
    places = np.repeat(pieces.row * shape[1] + pieces.offset, pieces.length) + within
    indices[places] = np.repeat(pieces.start, pieces.length) + within + 1
    last = (pieces.row * shape[1] + pieces.offset + pieces.length - 1)[pieces.ends_document]
    indices[last] = -1
    return indices.reshape(shape)


def _copy_pieces(
    source: np.ndarray, pieces: Pieces, destination: npt.NDArray[np.int64], run: npt.NDArray[np.int64], dtype: type
) -> np.ndarray:
    """Copy each piece separately; positions between pieces are zero."""
    out = np.zeros(int(run.sum()), dtype)
    for start, length, to in zip(pieces.start.tolist(), pieces.length.tolist(), destination.tolist(), strict=True):
        out[to : to + length] = source[start : start + length]
    return out


def _copy_by_index(
    source: np.ndarray, pieces: Pieces, destination: npt.NDArray[np.int64], run: npt.NDArray[np.int64], dtype: type
) -> np.ndarray:
    """Copy all pieces by one gather; positions between pieces hold the tokens that follow them in the
    file."""
    indices = np.arange(int(run.sum()))
    indices += np.repeat(pieces.start - destination, run)
    return source.take(indices, mode="clip").astype(dtype)
