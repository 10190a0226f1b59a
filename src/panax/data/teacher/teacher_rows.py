"""Rows of tokens with a teacher's most likely tokens, and the rows in which the teacher is evaluated."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..preferences.pair_rows import fill_rows
from ..text.packing import Documents, PackedRow, PackedRowSource, Pieces, RowArrays, find_targets, gather_pieces
from ..text.token_source import TEXT_LEAVES, row_leaves
from .stored_teacher import StoredTeacher

TEACHER_LEAVES = ("teacher_tokens", "teacher_log_probabilities")
"""The leaves that a teacher adds to a batch, each (batch, seq, candidate)."""


def teacher_leaves(top_k: int) -> Mapping[str, Any]:
    """Return the dtypes of the leaves, with the shape of each position's values."""
    return dict(zip(TEACHER_LEAVES, (np.dtype((np.int32, (top_k,))), np.dtype((np.float32, (top_k,)))), strict=True))


class TargetRows(PackedRowSource, Protocol):
    """Rows of which each target is known by its index in the token file."""

    def target_indices(self, epoch: int, indices: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]: ...


class _Row:
    """`RowArrays` with the teacher's leaves."""

    def __init__(self, leaves: dict[str, Any]) -> None:
        self._leaves = leaves

    def _asdict(self) -> dict[str, Any]:
        return self._leaves


class TeacherRows:
    """Rows with a teacher's tokens and log-probabilities for each target with loss; zeros elsewhere."""

    def __init__(self, rows: TargetRows, teacher: StoredTeacher) -> None:
        self._rows, self._teacher = rows, teacher
        self.seed, self.num_rows, self.sequence_length = rows.seed, rows.num_rows, rows.sequence_length
        self.fingerprint = f"{rows.fingerprint}-{teacher.facts.fingerprint}"
        self.starts = rows.starts
        self.tokenizers: frozenset[str] = getattr(rows, "tokenizers", frozenset())

    @property
    def leaves(self) -> Mapping[str, Any]:
        return {**row_leaves(self._rows), **teacher_leaves(self._teacher.facts.top_k)}

    def row(self, epoch: int, index: int) -> PackedRow:
        return self._rows.row(epoch, index)

    def read_rows(self, epoch: int, indices: npt.NDArray[np.int64], width: int) -> RowArrays:
        leaves = self._rows.read_rows(epoch, indices, width)._asdict()
        targets = self._rows.target_indices(epoch, indices, width)
        ids, values = self._teacher.read(np.where(leaves["loss_mask"] > 0, targets, -1))
        return _Row({**leaves, **dict(zip(TEACHER_LEAVES, (ids, values), strict=True))})

    def width(self, epoch: int, indices: npt.NDArray[np.int64]) -> int:
        return self._rows.width(epoch, indices)

    def document_counts(self, epoch: int, index: int) -> npt.NDArray[np.int64]:
        return self._rows.document_counts(epoch, index)


class DocumentRows:
    """Rows in which each target of a token file occurs once: documents from their beginning, several in a row.

    A document longer than a row continues in another one, without its earlier part.
    """

    def __init__(self, documents: Documents, *, sequence_length: int, whole_documents: bool) -> None:
        """Lay documents into rows.

        Args:
            whole_documents: True to continue documents that are longer than a row; False to cut them there.
        """
        self.seed, self.sequence_length = 0, sequence_length
        self._documents = documents
        targets = documents.lengths - 1
        counts = -(-targets // sequence_length) if whole_documents else np.minimum(targets, 1)
        document = np.repeat(np.arange(len(targets)), counts)
        number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._starts = documents.starts[document] + number * sequence_length
        remaining = documents.lengths[document] - number * sequence_length
        self._lengths = np.minimum(remaining, sequence_length)
        self._ends = remaining <= sequence_length
        self._bins = [np.array(pieces) for pieces in fill_rows(self._lengths, sequence_length)]
        self.num_rows = len(self._bins)
        self.fingerprint = f"{documents.fingerprint}-documents-{sequence_length}-{whole_documents}"
        self.starts = documents.starts

    @property
    def leaves(self) -> Mapping[str, type]:
        return TEXT_LEAVES

    def row(self, epoch: int, index: int) -> PackedRow:
        return PackedRow(*(leaf[0] for leaf in self.read_rows(epoch, np.array([index]), self.sequence_length)))

    def read_rows(self, epoch: int, indices: npt.NDArray[np.int64], width: int) -> PackedRow:
        self._documents.store.check()
        return gather_pieces(self._documents.store, self._pieces(indices), (len(indices), width))

    def target_indices(self, epoch: int, indices: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
        """Return the index of each position's target in the token file, of shape (row, width); -1 without a target."""
        return find_targets(self._pieces(indices), (len(indices), width))

    def width(self, epoch: int, indices: npt.NDArray[np.int64]) -> int:
        return self.sequence_length

    def document_counts(self, epoch: int, index: int) -> npt.NDArray[np.int64]:
        return np.full(len(self.starts), epoch)

    def _pieces(self, indices: npt.NDArray[np.int64]) -> Pieces:
        bins = [self._bins[index] for index in indices.tolist()]
        piece = np.concatenate([*bins, np.zeros(0, np.int64)]).astype(np.int64)
        sizes = np.array([len(each) for each in bins], np.int64)
        row = np.repeat(np.arange(len(bins)), sizes)
        length = self._lengths[piece]
        before = np.cumsum(length) - length
        return Pieces(
            row=row,
            offset=before - before[np.searchsorted(row, row)] if len(row) else before,
            segment=np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + 1,
            start=self._starts[piece],
            length=length,
            ends_document=self._ends[piece],
        )
