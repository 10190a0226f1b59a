"""The first batches of a source, repeated: a test of whether the model can memorize them."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Literal

import numpy as np

from panax.core.errors import DataError
from panax.core.protocols import Axes, Position, Source, SourcedBatch


class FirstBatches:
    """The first `count` batches of a source, repeated endlessly; `once` yields each of them once.

    >>> from panax.data import IterableSource
    >>> first = FirstBatches(IterableSource([{"x": np.full(2, n)} for n in range(9)]), 2)
    >>> [int(batch["x"][0]) for batch, _ in islice(first.batches(), 5)]
    [0, 1, 0, 1, 0]
    >>> [int(batch["x"][0]) for batch, _ in first.without_repeats.batches()]
    [0, 1]
    """

    resume: Literal["exact", "replay"] = "exact"

    owns_memory = True  # of each batch: nothing writes to it after it was yielded

    def __init__(self, source: Source, count: int, *, endless: bool = True):
        self._source, self._count, self.endless = source, count, endless
        self._batches: list[dict[str, np.ndarray]] = []

    @property
    def axes(self) -> Mapping[str, Axes]:
        return self._source.axes

    @property
    def without_repeats(self) -> "FirstBatches":
        """Return the same batches without repetition."""
        other = FirstBatches(self._source, self._count, endless=False)
        # One list for both: a loader may yield its batches only once.
        other._batches = self._batches
        return other

    def batches(self, position: Position | None = None) -> Iterator[SourcedBatch]:
        if position is not None and not isinstance(position.get("first_batches"), int):
            raise DataError("the data's position is of another source; overfit_batches was not set before")
        if len(self._batches) < self._count:
            # Copies: a source may reuse the memory for its next batch.
            drawn = islice(self._source.batches(), self._count)
            self._batches[:] = [{name: np.array(leaf) for name, leaf in batch.items()} for batch, _ in drawn]
        if len(self._batches) < self._count:
            raise DataError(f"overfit_batches={self._count}, and the data has {len(self._batches)} batches; lower it")
        number = 0 if position is None else int(position["first_batches"])
        while self.endless or number < self._count:
            batch = self._batches[number % self._count]
            number += 1
            yield SourcedBatch(dict(batch), {"first_batches": number})
