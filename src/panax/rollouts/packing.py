"""Answers packed into rows of equal length, several in a row, so that a step computes little padding."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int, Shaped

from ..core.batch_checks import EXPERTS_LEAF
from ..data.preferences.pair_rows import fill_rows

SEGMENT = "segment"

MAX_SHAPES = 12
"""Maximum number of different numbers of rows, each of which costs a compilation."""

_RATIO = 0.85
"""Ratio of a number of rows to the next larger one."""

_SHORT = 128
"""Rows below this number of positions are joined: several short answers fill them better."""


@dataclasses.dataclass(frozen=True)
class PackedShapes:
    """Shapes of the rows of updates.

    Attributes:
        length: Positions of a row.
        counts: Numbers of rows, ascending; the last one has room for answers that are all as long as they may be.
    """

    length: int
    counts: tuple[int, ...]

    @classmethod
    def choose(cls, answers: int, length: int, *, max_length: int, multiple: int) -> "PackedShapes":
        """Choose the shapes for `answers` rows of `length` positions, of which none may have to be cut.

        Args:
            max_length: Maximum positions of a row.
            multiple: Divisor of every number of rows, and of `answers`.

        >>> PackedShapes.choose(64, 16, max_length=128, multiple=2)
        PackedShapes(length=128, counts=(2, 4, 6, 8))
        """
        joined = 1
        while (
            2 * joined * length <= min(_SHORT, max_length)
            and answers % (2 * joined) == 0
            and (answers // (2 * joined)) % multiple == 0
        ):
            joined *= 2
        fractions = (answers // joined * _RATIO**place for place in range(MAX_SHAPES))
        return cls(joined * length, tuple(sorted({-int(-each // multiple) * multiple for each in fractions})))


@dataclasses.dataclass(frozen=True, eq=False)
class AnswerPlaces:
    """Where the positions of answers are in packed rows.

    Attributes:
        shape: Rows, and positions of a row.
        answer, position: Index of each position's answer, and its position in that.
        row, place: Its row, and its position there.
        segment: Number of its answer in the row, from 1.
    """

    shape: tuple[int, int]
    answer: Int[np.ndarray, " position"]
    position: Int[np.ndarray, " position"]
    row: Int[np.ndarray, " position"]
    place: Int[np.ndarray, " position"]
    segment: Int[np.ndarray, " position"]

    @classmethod
    def fill(cls, sizes: Int[np.ndarray, " answer"], shapes: PackedShapes) -> "AnswerPlaces":
        """Place answers in the fewest rows among `shapes` that they fit in.

        Args:
            sizes: Positions of each answer with its prompt, at most `shapes.length`.
        """
        filled = fill_rows(sizes, shapes.length)
        count = next(count for count in shapes.counts if count >= len(filled))
        order = np.array([answer for answers in filled for answer in answers], np.int64)
        row = np.repeat(np.arange(len(filled)), [len(answers) for answers in filled])
        segment = np.concatenate([np.arange(1, len(answers) + 1) for answers in filled])
        ends = [np.cumsum(sizes[answers]) for answers in filled]
        begin = np.concatenate(ends) - sizes[order]
        lengths = sizes[order]
        position = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return cls(
            (count, shapes.length),
            np.repeat(order, lengths),
            position,
            np.repeat(row, lengths),
            np.repeat(begin, lengths) + position,
            np.repeat(segment, lengths),
        )

    def pack(self, leaves: Mapping[str, Shaped[np.ndarray, "answer length ..."]]) -> dict[str, np.ndarray]:
        """Return leaves in packed rows, (row, length, ...)."""
        packed = {}
        for name, leaf in leaves.items():
            empty = -1 if name == EXPERTS_LEAF else 0
            packed[name] = np.full((*self.shape, *leaf.shape[2:]), empty, leaf.dtype)
            values = self.segment if name == SEGMENT else leaf[self.answer, self.position]
            packed[name][self.row, self.place] = values
        return packed

    def unpack(
        self, leaf: Shaped[np.ndarray, "row packed"], like: Shaped[np.ndarray, "answer length"]
    ) -> Shaped[np.ndarray, "answer length"]:
        """Return a leaf of packed rows in the shape of `like`, with 0 after each answer."""
        rows = np.zeros(like.shape, leaf.dtype)
        rows[self.answer, self.position] = leaf[self.row, self.place]
        return rows


def pack_answers(batch: Mapping[str, np.ndarray], shapes: PackedShapes) -> dict[str, np.ndarray]:
    """Return a batch with one answer in each row as one of packed rows.

    Args:
        batch: As `make_rows` returns it.
    """
    return AnswerPlaces.fill(count_positions(batch[SEGMENT]), shapes).pack(batch)


def count_positions(segment: Int[np.ndarray, "answer length"]) -> Int[np.ndarray, " answer"]:
    """Return the number of positions of each answer with its prompt."""
    return (segment != 0).sum(axis=1)
