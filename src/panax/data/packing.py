"""Rows of tokens as a pure function of (seed, epoch, index): documents packed without gaps, or one document a row.

Packed: the documents of an epoch, in an order drawn from the seed, are one long stream, cut into windows of the
sequence length; the windows are then permuted too, so that a batch is not one long document. Each token is in exactly
one window of an epoch. The last window is filled up with padding.

Any row can be made at any time in any order from O(documents) memory, so order can't depend on devices or processes.
"""

import dataclasses
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .tokens import TokenStore

_PURPOSES = {"documents": 0, "windows": 1, "held_out": 2}


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


class Row(NamedTuple):
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
class Rows(Protocol):
    """What a source of token batches draws from.

    Attributes:
        seed: What the order depends on.
        num_rows: Rows in an epoch, the same in each.
        sequence_length: The most tokens a row holds.
        fingerprint: A hash of everything but the seed that decides what row i of an epoch is.
    """

    seed: int
    num_rows: int
    sequence_length: int
    fingerprint: str

    def row(self, epoch: int, index: int) -> Row: ...

    def width(self, epoch: int, indices: npt.NDArray[np.int64]) -> int:
        """The length, in tokens, of rows `indices` when they are in one batch."""
        ...


class PackedRows:
    """Windows of exactly `sequence_length` tokens (the epoch's last may be shorter); documents may be cut by them."""

    def __init__(self, documents: Documents, *, sequence_length: int, seed: int) -> None:
        self.seed = seed
        self.sequence_length = sequence_length
        self.num_rows = -(-documents.num_tokens // sequence_length)
        self.fingerprint = f"{documents.fingerprint}-packed-{sequence_length}"
        self._documents = documents
        self._latest: _Epoch | None = None

    def row(self, epoch: int, index: int) -> Row:
        stream = self._stream(epoch)
        begin = int(stream.windows[index]) * self.sequence_length
        end = min(begin + self.sequence_length, int(stream.ends[-1]))
        first, last = np.searchsorted(stream.ends, [begin, end - 1], side="right")
        these = slice(int(first), int(last) + 1)
        order, ends = stream.order[these], stream.ends[these]
        lengths = self._documents.lengths[order]
        skipped = np.maximum(begin - (ends - lengths), 0)
        taken = np.minimum(ends, end) - np.maximum(ends - lengths, begin)
        return _read(self._documents.store, self._documents.starts[order] + skipped, taken, ends <= end)

    def width(self, epoch: int, indices: npt.NDArray[np.int64]) -> int:
        return self.sequence_length

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
        beyond = np.maximum(documents.lengths - sequence_length, 0)
        self.num_truncated_documents = int(np.count_nonzero(beyond))
        self.num_truncated_tokens = int(beyond.sum())
        self._buckets = np.array([*buckets, sequence_length])
        self._documents = documents
        self._latest: tuple[int, npt.NDArray[np.int64]] | None = None

    def row(self, epoch: int, index: int) -> Row:
        document = self._order(epoch)[index : index + 1]
        lengths = self._documents.lengths[document]
        taken = np.minimum(lengths, self.sequence_length)
        return _read(self._documents.store, self._documents.starts[document], taken, taken == lengths)

    def width(self, epoch: int, indices: npt.NDArray[np.int64]) -> int:
        longest = self._documents.lengths[self._order(epoch)[indices]].max(initial=1)
        return int(self._buckets[np.searchsorted(self._buckets, min(int(longest), self.sequence_length))])

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        latest = self._latest
        if latest is None or latest[0] != epoch:
            latest = self._latest = epoch, permutation(self.num_rows, seed=self.seed, epoch=epoch, purpose="documents")
        return latest[1]


def _read(
    store: TokenStore, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], whole: npt.NDArray[np.bool_]
) -> Row:
    """Read pieces of documents one after another; `whole` says of each whether it reaches its document's end."""
    ends = np.cumsum(lengths)
    position = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    here = position + np.repeat(starts, lengths)
    has_target = np.ones(len(here), np.bool_)
    has_target[ends[whole] - 1] = False
    following = here + has_target
    targets = np.where(has_target, store.tokens[following], 0)
    loss = has_target if store.loss_mask is None else has_target & (store.loss_mask[following] != 0)
    segment = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return Row(
        tokens=store.tokens[here].astype(np.int32),
        targets=targets.astype(np.int32),
        loss_mask=loss.astype(np.float32),
        segment=segment.astype(np.int32),
        position=position.astype(np.int32),
    )
