"""Batches padded with rows of weight zero, if their number of rows does not divide over the devices."""

from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from ...core.errors import DataError
from ...core.protocols import Axes, Position, Source, SourcedBatch
from ..text.token_source import RowSource, WantedRows
from .example_source import MASK


def pad_batches(source: Source, multiple: int) -> Source:
    """Pad batches with rows of zeros to a multiple of `multiple`; their `loss_mask` is 0.

    >>> from panax.data import IterableSource
    >>> three = IterableSource([{"x": np.arange(3), "loss_mask": np.ones(3)}])
    >>> batch, _ = next(pad_batches(three, 4).batches())
    >>> batch["loss_mask"].tolist()
    [1.0, 1.0, 1.0, 0.0]
    """
    if multiple == 1:
        return source
    return _PaddedRowSource(source, multiple) if isinstance(source, RowSource) else _PaddedSource(source, multiple)


def round_up(rows: int, multiple: int) -> int:
    """Round up to a multiple of `multiple`.

    >>> round_up(32, 3)
    33
    """
    return -(-rows // multiple) * multiple


class _PaddedSource:
    def __init__(self, source: Source, multiple: int):
        self._source, self._multiple = source, multiple

    @property
    def axes(self) -> Mapping[str, Axes]:
        return self._source.axes

    @property
    def resume(self) -> Literal["exact", "replay"]:
        return self._source.resume

    def batches(self, position: Position | None = None) -> Iterator[SourcedBatch]:
        for batch, after in self._source.batches(position):
            rows = len(next(iter(batch.values())))
            yield SourcedBatch(_with_zeros(batch, round_up(rows, self._multiple) - rows), after)


class _PaddedRowSource(_PaddedSource):
    _source: RowSource

    @property
    def batch_size(self) -> int:
        return round_up(self._source.batch_size, self._multiple)

    def batches_of(self, rows: WantedRows, position: Position | None = None) -> Iterator[SourcedBatch]:
        row_array = np.asarray(rows)
        source_rows = row_array[row_array < self._source.batch_size]
        # A process without rows still reads one, for the shape.
        for batch, after in self._source.batches_of(
            source_rows if len(source_rows) else np.zeros(1, np.int64), position
        ):
            batch = {name: leaf[: len(source_rows)] for name, leaf in batch.items()}
            yield SourcedBatch(_with_zeros(batch, len(row_array) - len(source_rows)), after)


def _with_zeros(batch: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    if rows and MASK not in batch:
        raise DataError(
            f"the batch has the leaves {sorted(batch)}, and rows can be padded only if {MASK!r} marks those that "
            f"count; remove step.pad_rows, and give batches that divide over the devices"
        )
    return {
        name: np.concatenate([leaf, np.zeros((rows, *leaf.shape[1:]), leaf.dtype)]) if rows else leaf
        for name, leaf in batch.items()
    }
