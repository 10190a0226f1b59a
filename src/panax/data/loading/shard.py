"""A part of every global batch: for one of several jobs that train on the rows of a shared batch."""

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from ...core.errors import DataError
from ...core.protocols import Axes, Position, Source, SourcedBatch

ROW_LEAF = "row"
"""Leaf with each row's index in the global batch, which determines a row's random numbers."""


class BatchShard:
    """Part `index` of `count` equal parts of each batch of a source, with the leaf `row`. Positions are those
    of the source.

    >>> from panax.data import IterableSource
    >>> second = BatchShard(IterableSource([{"x": np.arange(6)}]), 1, 3)
    >>> {name: leaf.tolist() for name, leaf in next(second.batches()).batch.items()}
    {'x': [2, 3], 'row': [2, 3]}
    """

    def __init__(self, source: Source, index: int, count: int):
        self._source, self._index, self._count = source, index, count

    @property
    def axes(self) -> Mapping[str, Axes]:
        axes = self._source.axes
        return {**axes, ROW_LEAF: next(iter(axes.values()))[:1]}

    @property
    def resume(self) -> Literal["exact", "replay"]:
        return self._source.resume

    def batches(self, position: Position | None = None) -> Iterator[SourcedBatch]:
        """Yield this part of each batch.

        Raises:
            DataError: The rows of a batch don't divide into `count` parts.
        """
        for batch, after in self._source.batches(position):
            rows = len(next(iter(batch.values())))
            if rows % self._count:
                raise DataError(
                    f"a batch has {rows} rows, which {self._count} islands can't share equally; set the batch size to a "
                    "multiple of "
                    f"{self._count}"
                )
            size = rows // self._count
            local_slice = slice(self._index * size, (self._index + 1) * size)
            yield SourcedBatch(
                {
                    **{name: leaf[local_slice] for name, leaf in batch.items()},
                    ROW_LEAF: np.arange(rows, dtype=np.int32)[local_slice],
                },
                after,
            )
