"""Rows of labeled answers: an answer and a mismatched one in one row, as segments 2k-1 and 2k, with their label."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..text.packing import PackedRow
from ..text.token_source import TEXT_LEAVES
from .pair_encoder import DESIRABLE_LOSS
from .pair_rows import PAIR_LEAVES, PairRows

LABEL = "desirable"
"""Leaf with 1 for the positions of good answers and of the mismatched ones beside them, else 0."""


def answer_leaves(*, has_reference: bool) -> Mapping[str, type]:
    """Return the leaves of a batch of labeled answers, each (batch, seq)."""
    return {**(PAIR_LEAVES if has_reference else TEXT_LEAVES), LABEL: np.int32}


class AnswerLeaves:
    """`RowArrays` with the label."""

    def __init__(self, leaves: dict[str, Any]) -> None:
        self._leaves = leaves

    def _asdict(self) -> dict[str, Any]:
        return self._leaves


class AnswerRows(PairRows):
    """`PairRows` of answers, each with a mismatched one in place of a rejected one."""

    record_name: ClassVar[str] = "labeled answers"
    side_names: ClassVar[tuple[str, str]] = ("labeled", "mismatched")

    @property
    def leaves(self) -> Mapping[str, type]:
        return answer_leaves(has_reference=self._reference is not None)

    def row(self, epoch: int, index: int) -> PackedRow:
        width = int(self._sizes[self._order(epoch)[index]])
        return PackedRow(*(leaf[0] for leaf in super().read_rows(epoch, np.array([index]), width)[:5]))

    def read_rows(self, epoch: int, indices: npt.NDArray[np.int64], width: int) -> AnswerLeaves:  # pyright: ignore[reportIncompatibleMethodOverride]
        leaves = super().read_rows(epoch, indices, width)._asdict()
        # Labels by row and pair, of which a row has fewer than positions.
        rows = self._order(epoch)[indices]
        labels = np.zeros((len(indices), width // 2 + 1), np.int32)
        for row, index in enumerate(rows.tolist()):
            pairs = self._pairs[self._bounds[index] : self._bounds[index + 1]]
            labels[row, 1 : len(pairs) + 1] = [self._is_desirable(pair) for pair in pairs.tolist()]
        return AnswerLeaves({**leaves, LABEL: np.take_along_axis(labels, (leaves["segment"] + 1) // 2, axis=1)})

    def _is_desirable(self, pair: int) -> bool:
        mask = self._documents.store.loss_mask
        if mask is None:
            return False
        start, length = (int(each[2 * pair]) for each in (self._documents.starts, self._documents.lengths))
        return bool((mask[start : start + length] == DESIRABLE_LOSS).any())
