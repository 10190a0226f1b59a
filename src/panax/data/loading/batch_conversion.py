"""Batches with another library's leaf names, converted to the leaves of the task that is trained on them."""

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from ...core import Task
from ...core.protocols import Axes, Position, Source, SourcedBatch
from ..text.token_source import RowSource, WantedRows
from .iterable import IterableSource


def convert_batches(source: Source, task: Task) -> Source:
    """Convert batches by `task.convert_batch`; return the source itself if the task uses the source's leaf
    names."""
    if set(task.convert_axes(source.axes)) == set(source.axes):
        return source
    return _ConvertedRows(source, task) if isinstance(source, RowSource) else ConvertedSource(source, task)


class ConvertedSource:
    """A source with each batch converted."""

    def __init__(self, source: Source, task: Task):
        self._source, self._task = source, task

    @property
    def owns_memory(self) -> bool:
        return getattr(self._source, "owns_memory", False)

    @property
    def axes(self) -> Mapping[str, Axes]:
        return self._task.convert_axes(self._source.axes)

    @property
    def resume(self) -> Literal["exact", "replay"]:
        return self._source.resume

    def first_batch(self) -> Mapping[str, np.ndarray]:
        """Return the first batch without consuming it."""
        if isinstance(self._source, IterableSource):
            return self._task.convert_batch(self._source.first_batch())
        return next(iter(self.batches())).batch

    def batches(self, position: Position | None = None) -> Iterator[SourcedBatch]:
        for batch, after in self._source.batches(position):
            yield SourcedBatch(dict(self._task.convert_batch(batch)), after)


class _ConvertedRows(ConvertedSource):
    _source: RowSource

    @property
    def batch_size(self) -> int:
        return self._source.batch_size

    def batches_of(self, rows: WantedRows, position: Position | None = None) -> Iterator[SourcedBatch]:
        for batch, after in self._source.batches_of(rows, position):
            yield SourcedBatch(dict(self._task.convert_batch(batch)), after)
