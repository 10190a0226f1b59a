"""Rows of preference pairs: both answers of a pair in one row, as segments 2k-1 and 2k."""

import bisect
import itertools
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from panax.core.errors import DataError

from ..text.packing import Documents, PackedRow, Pieces, find_targets, gather_pieces, permutation
from ..text.token_source import TEXT_LEAVES
from .reference import ReferenceLogProbabilities

TooLong = Literal["refuse", "cut"]
"""Pairs that are longer than a row: an error, or both answers are cut at their ends."""


REFERENCE = "reference_log_probability"
"""Leaf with the reference model's log-probability of each target."""

PAIR_LEAVES: Mapping[str, type] = {**TEXT_LEAVES, REFERENCE: np.float32}
"""The leaves of a batch of pairs with a reference model, each (batch, seq)."""


class PairRow(NamedTuple):
    """`PackedRow` with log-probabilities of a reference model.

    Attributes:
        reference_log_probability: Of each target with loss; else 0.
    """

    tokens: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.float32]
    segment: npt.NDArray[np.int32]
    position: npt.NDArray[np.int32]
    reference_log_probability: npt.NDArray[np.float32]


class PairRows:
    """Rows with as many whole pairs as fit, or with one pair each; the same pairs share a row in each epoch.

    Attributes:
        tokenizers: Fingerprints of the tokenizers that made the ids, if known.
        leaves: Names and dtypes of the leaves.
        num_cut: Number of pairs that are cut to fit a row.
    """

    record_name: ClassVar[str] = "preference pairs"
    side_names: ClassVar[tuple[str, str]] = ("chosen", "rejected")

    def __init__(
        self,
        documents: Documents,
        *,
        sequence_length: int,
        seed: int,
        packing: bool = True,
        buckets: tuple[int, ...] = (),
        too_long: TooLong = "refuse",
        reference: ReferenceLogProbabilities | None = None,
    ) -> None:
        """Lay pairs into rows.

        Args:
            documents: Chosen and rejected answers in turn.
            buckets: Without packing, the lengths that a batch may have, ascending; `sequence_length` is always included.

        Raises:
            DataError: A pair is longer than a row, or nothing of an answer is left of it.
        """
        self.seed, self.sequence_length = seed, sequence_length
        self._documents, self._reference = documents, reference
        self._buckets = np.array([*buckets, sequence_length])
        lengths = documents.lengths.reshape(-1, 2)
        self._lengths = _cut_lengths(lengths, sequence_length)
        cut = np.flatnonzero((self._lengths != lengths).any(axis=1))
        self.num_cut = len(cut)
        if len(cut) and too_long == "refuse":
            raise DataError(
                f"{len(cut):,} of {len(lengths):,} {self.record_name} are longer than "
                f"data.sequence_length={sequence_length}; the longest has {int(lengths.sum(axis=1).max())} tokens in both "
                f'answers with their prompts. Raise sequence_length, or set data.corpus.too_long="cut"'
            )
        self._check_cut(cut)
        sizes = self._lengths.sum(axis=1)
        bins = fill_rows(sizes, sequence_length) if packing else [[pair] for pair in range(len(sizes))]
        self._pairs = np.array(list(itertools.chain.from_iterable(bins)), np.int64)
        self._bounds = np.cumsum([0, *(len(pairs) for pairs in bins)])
        self._sizes = np.array([sizes[pairs].sum() for pairs in bins], np.int64)
        self.num_rows = len(bins)
        kind = f"pairs{'-packed' if packing else ''}-{sequence_length}-{too_long}"
        self.fingerprint = f"{documents.fingerprint}-{kind}" + (
            "" if reference is None else f"-{reference.fingerprint}"
        )
        self.tokenizers = frozenset({documents.store.tokenizer} - {""})
        self.starts = documents.starts
        self._packing = packing
        self._latest: tuple[int, npt.NDArray[np.int64]] | None = None

    @property
    def leaves(self) -> Mapping[str, type]:
        return TEXT_LEAVES if self._reference is None else PAIR_LEAVES

    @property
    def num_pairs(self) -> int:
        return len(self._lengths)

    def row(self, epoch: int, index: int) -> PackedRow:
        width = int(self._sizes[self._order(epoch)[index]])
        return PackedRow(*(leaf[0] for leaf in self.read_rows(epoch, np.array([index]), width)[:5]))

    def read_rows(self, epoch: int, indices: npt.NDArray[np.int64], width: int) -> PackedRow | PairRow:
        self._documents.store.check()
        pieces, shape = self._pieces(epoch, indices), (len(indices), width)
        rows = gather_pieces(self._documents.store, pieces, shape)
        if self._reference is None:
            return rows
        targets = find_targets(pieces, shape)
        values = self._reference.values[np.maximum(targets, 0)]
        return PairRow(*rows, np.where((targets >= 0) & (rows.loss_mask > 0), values, np.float32(0)))

    def target_indices(self, epoch: int, indices: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
        """Return the index of each position's target in the token file, of shape (row, width); -1 without a target."""
        return find_targets(self._pieces(epoch, indices), (len(indices), width))

    def width(self, epoch: int, indices: npt.NDArray[np.int64]) -> int:
        if self._packing:
            return self.sequence_length
        longest = int(self._sizes[self._order(epoch)[indices]].max(initial=1))
        return int(self._buckets[np.searchsorted(self._buckets, longest)])

    def document_counts(self, epoch: int, index: int) -> npt.NDArray[np.int64]:
        times = np.full((self.num_pairs, 2), epoch)
        for row in self._order(epoch)[:index]:
            times[self._pairs[self._bounds[row] : self._bounds[row + 1]]] += 1
        return times.reshape(-1)

    def describe(self, which: str) -> str:
        """Describe how pairs fit into rows, in a line for the user."""
        tokens, longest = self._lengths.sum(), self._documents.lengths.reshape(-1, 2).sum(axis=1).max(initial=0)
        filled = tokens / (self.num_rows * self.sequence_length)
        line = (
            f"{self.num_pairs:,} {which} of {tokens / self.num_pairs:,.0f} tokens on average, {longest:,} at most; "
            f"{self.num_rows:,} rows of {self.sequence_length:,}, {filled:.1%} filled"
        )
        return f"{line}; {self.num_cut:,} are longer than a row and cut" if self.num_cut else line

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        # Replaced as a whole, so that a thread that still prefetches never sees a mix of two epochs.
        latest = self._latest
        if latest is None or latest[0] != epoch:
            latest = self._latest = epoch, permutation(self.num_rows, seed=self.seed, epoch=epoch, purpose="windows")
        return latest[1]

    def _pieces(self, epoch: int, indices: npt.NDArray[np.int64]) -> Pieces:
        rows = self._order(epoch)[indices]
        counts = 2 * (self._bounds[rows + 1] - self._bounds[rows])
        row = np.repeat(np.arange(len(rows)), counts)
        number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        document = 2 * self._pairs[self._bounds[rows][row] + number // 2] + number % 2
        length = self._lengths.reshape(-1)[document]
        before = np.cumsum(length) - length
        return Pieces(
            row=row,
            offset=before - before[np.searchsorted(row, row)] if len(row) else before,
            segment=number + 1,
            start=self._documents.starts[document],
            length=length,
            ends_document=length == self._documents.lengths[document],
        )

    def _check_cut(self, cut: npt.NDArray[np.int64]) -> None:
        """Check that each answer that was cut has a target with loss left."""
        mask = self._documents.store.loss_mask
        if mask is None:
            return
        for pair in cut.tolist():
            for side, name in enumerate(self.side_names):
                start = int(self._documents.starts[2 * pair + side])
                # The target of the last position is the token after it.
                if not mask[start + 1 : start + int(self._lengths[pair, side]) + 1].any():
                    raise DataError(
                        f"number {pair} of the {self.record_name}: nothing of its {name} answer is left in data.sequence_length="
                        f"{self.sequence_length}, since its prompt fills the row; raise sequence_length, or remove the pair"
                    )


def _cut_lengths(lengths: npt.NDArray[np.int64], room: int) -> npt.NDArray[np.int64]:
    """Return the lengths of both answers such that they fit in a row: a longer one takes the room that the other leaves.

    >>> _cut_lengths(np.array([[3, 4], [9, 2], [9, 9]]), 10).tolist()
    [[3, 4], [8, 2], [5, 5]]
    """
    chosen = np.minimum(lengths[:, 0], np.maximum(room // 2, room - lengths[:, 1]))
    return np.stack([chosen, np.minimum(lengths[:, 1], room - chosen)], axis=1)


def fill_rows(sizes: npt.NDArray[np.int64], room: int) -> list[list[int]]:
    """Put pairs into rows, the longest first, each into the fullest row that has room for it.

    >>> fill_rows(np.array([3, 5, 4, 2]), 7)
    [[1, 3], [2, 0]]
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # ascending (room left, row)
    for pair in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[pair])
        place = bisect.bisect_left(free, (size, -1))
        if place == len(free):
            left, row = room, len(rows)
            rows.append([])
        else:
            left, row = free.pop(place)
        rows[row].append(pair)
        bisect.insort(free, (left - size, row))
    return rows
