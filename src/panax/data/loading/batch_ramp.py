"""A global batch that grows over the first steps: each batch of a source is consumed in several steps, in the
source's order."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from ...core.errors import DataError, RecipeError
from ...core.protocols import Axes, Position, Source, SourcedBatch
from ...core.validation import Validated
from ..text.token_source import Accounting, DocumentCounts, RowSource, WantedRows

POSITION_KEY = "batch_ramp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchRamp(Validated):
    """Schedule of a growing global batch: stages of `steps` steps, each with a larger part of the batch; then
    the full batch.

    With `parts=(8, 4, 2)` and `steps=80`, 80 steps train on an eighth of the batch each, 80 on a quarter, 80
    on a half. Rows have the same order as without a ramp, each once.

    Attributes:
        parts: Number of steps that a batch is divided into in each stage, descending; empty for no ramp.
        steps: Steps of each stage; a multiple of all parts, so that a stage ends with a batch.
    """

    parts: tuple[int, ...] = ()
    steps: int = 0

    def __post_init__(self) -> None:
        if bool(self.parts) != bool(self.steps) or self.steps < 0:
            raise RecipeError(
                f"batch_ramp.parts={self.parts}, batch_ramp.steps={self.steps}; expected both, as parts=(8, 4, 2) and steps=80, "
                f"or neither"
            )
        if min(self.parts, default=2) < 2 or any(after >= before for before, after in itertools.pairwise(self.parts)):
            raise RecipeError(f"batch_ramp.parts={self.parts}; expected falling numbers of 2 or more, as (8, 4, 2)")
        for count in self.parts:
            if self.steps % count:
                near = " or ".join(f"{n}" for n in (self.steps // count * count, -(-self.steps // count) * count) if n)
                raise RecipeError(
                    f"batch_ramp.steps={self.steps} is not a multiple of {count}: the stage would end within a batch; take {near}"
                )

    @property
    def end(self) -> int:
        """Return the number of steps of all stages together."""
        return len(self.parts) * self.steps

    def parts_at(self, step: int) -> int:
        """Return the number of steps that a batch begun after `step` steps is divided into.

        >>> ramp = BatchRamp(parts=(4, 2), steps=8)
        >>> [ramp.parts_at(step) for step in (0, 7, 8, 15, 16)]
        [4, 4, 2, 2, 1]
        """
        return self.parts[step // self.steps] if step < self.end else 1


class RampedSource:
    """A source with its first batches each consumed in several steps.

    During the ramp, a position has the source's positions before and after the batch being consumed, and the
    number of steps so far. Afterwards it is the source's position.
    """

    def __init__(self, source: Source, ramp: BatchRamp):
        self.source, self.ramp = source, ramp

    @property
    def axes(self) -> Mapping[str, Axes]:
        return self.source.axes

    @property
    def resume(self) -> Literal["exact", "replay"]:
        return self.source.resume

    def batches(self, position: Position | None = None) -> Iterator[SourcedBatch]:
        """Yield batches of growing size.

        Raises:
            DataError: The position is of another source or ramp.
        """
        num_steps = self.steps_before(position)
        return self.split_batches(
            self.source.batches(self.source_position(position)), num_steps, self.source_position(position)
        )

    def parts_at(self, position: Position | None) -> int:
        """Return the number of steps that the batch at a position is divided into.

        Raises:
            DataError: The position is of another ramp.
        """
        return self.ramp.parts_at(self.steps_before(position))

    def next_stage(self, position: Position | None) -> RowSource:
        """Return the batches of a `RowSource` up to the next change of size, as a source of batches of one
        size."""
        assert isinstance(self.source, RowSource)
        parts = self.parts_at(position)
        return self.source if parts == 1 else _Stage(self, self.source, parts)

    def steps_before(self, position: Position | None) -> int:
        """Return the steps of the ramp before a position; all of them after the ramp."""
        if position is None:
            return 0
        if POSITION_KEY not in position:
            return self.ramp.end
        said = position[POSITION_KEY]
        saved_ramp, current_ramp = (said.get("parts"), said.get("steps")), (list(self.ramp.parts), self.ramp.steps)
        if saved_ramp != current_ramp:
            raise DataError(
                f"the data's position is of another batch ramp: parts {saved_ramp[0]} and steps {saved_ramp[1]}, but they are "
                f"{current_ramp[0]} and {current_ramp[1]} now"
            )
        return said["taken"]

    @staticmethod
    def source_position(position: Position | None) -> Position | None:
        """Return the source's position before the batch being consumed."""
        return position["before"] if position is not None and POSITION_KEY in position else position

    def split_batches(
        self, batches: Iterator[SourcedBatch], num_steps: int, before: Position | None, end: int | None = None
    ) -> Iterator[SourcedBatch]:
        """Yield the source's batches, each divided into parts according to the ramp.

        Args:
            num_steps: Steps of the ramp so far; the first batch's earlier parts are skipped.
            end: Steps after which to end; None: at the end of the source.
        """
        for batch, after in batches:
            parts = self.ramp.parts_at(num_steps)
            # Stages begin with a batch, and consist of complete ones.
            for part in range(num_steps % parts, parts):
                num_steps = min(num_steps + 1, self.ramp.end)
                position = self._position(num_steps, before if part + 1 < parts else after, after)
                yield SourcedBatch(batch if parts == 1 else _take_part(batch, part, parts), position)
            before = after
            if num_steps == end:
                return

    def _position(self, num_steps: int, before: Position | None, after: Position) -> Position:
        if num_steps == self.ramp.end:
            return after
        ramp = {"parts": list(self.ramp.parts), "steps": self.ramp.steps, "taken": num_steps}
        return {POSITION_KEY: ramp, "before": before, "after": dict(after)}


class RampedAccountingSource(RampedSource):
    """A ramped source that can report which data was seen; the batch being consumed counts as seen."""

    def epochs(self, position: Position) -> Mapping[str, float]:
        return self._accounting.epochs(_position_after(position))

    def count_documents(self, position: Position) -> Mapping[str, DocumentCounts]:
        return self._accounting.count_documents(_position_after(position))

    @property
    def _accounting(self) -> Accounting:
        assert isinstance(self.source, Accounting)
        return self.source


def apply_batch_ramp(source: Source, ramp: BatchRamp) -> Source:
    """Wrap a source with a ramp; return it unchanged if there is no ramp.

    >>> from panax.data import IterableSource
    >>> rows = IterableSource([{"x": np.arange(4) + 4 * n} for n in range(3)], epochs=1)
    >>> [batch["x"].tolist() for batch, _ in apply_batch_ramp(rows, BatchRamp(parts=(2,), steps=2)).batches()]
    [[0, 1], [2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    """
    if not ramp.parts:
        return source
    return (RampedAccountingSource if isinstance(source, Accounting) else RampedSource)(source, ramp)


def _position_after(position: Position) -> Position:
    return position["after"] if POSITION_KEY in position else position


def _take_part(batch: Mapping[str, np.ndarray], index: int, parts: int) -> dict[str, np.ndarray]:
    rows_per_part = _divide(len(next(iter(batch.values()))), parts)
    return {name: leaf[index * rows_per_part : (index + 1) * rows_per_part] for name, leaf in batch.items()}


def _divide(rows: int, parts: int) -> int:
    if rows % parts:
        raise DataError(
            f"a batch of {rows} rows can't be divided into {parts} parts; choose batch_ramp.parts that divide it"
        )
    return rows // parts


class _Stage:
    """A `RowSource` of the batches of one size of a ramp, up to the end of its stage."""

    def __init__(self, ramped: RampedSource, source: RowSource, parts: int):
        self._ramped, self._source, self._parts = ramped, source, parts
        self.batch_size = _divide(source.batch_size, parts)

    @property
    def axes(self) -> Mapping[str, Axes]:
        return self._ramped.axes

    @property
    def resume(self) -> Literal["exact", "replay"]:
        return self._ramped.resume

    def batches(self, position: Position | None = None) -> Iterator[SourcedBatch]:
        return self.batches_of(range(self.batch_size), position)

    def batches_of(self, rows: WantedRows, position: Position | None = None) -> Iterator[SourcedBatch]:
        # The same rows of each part: those of all parts are drawn at once.
        source_rows = (np.arange(self._parts)[:, None] * self.batch_size + np.asarray(rows)).reshape(-1)
        ramped, num_steps = self._ramped, self._ramped.steps_before(position)
        before, steps = ramped.source_position(position), ramped.ramp.steps
        return ramped.split_batches(
            self._source.batches_of(source_rows, before), num_steps, before, num_steps + steps - num_steps % steps
        )
