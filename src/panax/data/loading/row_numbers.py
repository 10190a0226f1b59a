"""Batches of row indices only, for a task that generates its data."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal

import numpy as np

from panax.core.errors import DataError, RecipeError
from panax.core.protocols import Axes, Position, SourcedBatch
from panax.core.validation import Validated

from ..text.token_source import WantedRows


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowNumbers(Validated):
    """The leaf `row`, int32 (batch), with indices from 0 on, the same in each batch.

    It replaces the data of an experiment with a task that collects its own data
    (`panax.core.CollectingTask`).

    Attributes:
        batch_size: Rows of each batch.
        num_batches: Number of batches; None: endless.

    >>> [batch["row"].tolist() for batch, _ in RowNumbers(batch_size=3, num_batches=2).batches()]
    [[0, 1, 2], [0, 1, 2]]
    """

    batch_size: int
    num_batches: int | None = None

    @property
    def axes(self) -> Mapping[str, Axes]:
        return MappingProxyType({"row": ("batch",)})

    @property
    def resume(self) -> Literal["exact", "replay"]:
        return "exact"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise RecipeError(f"batch_size={self.batch_size}; expected 1 or more rows")
        if self.num_batches is not None and self.num_batches < 1:
            raise RecipeError(f"num_batches={self.num_batches}; expected 1 or more, or None without an end")

    def batches(self, position: Position | None = None) -> Iterator[SourcedBatch]:
        """Yield batches from `position` on.

        Raises:
            DataError: The position is of another source.
        """
        return self._of(np.arange(self.batch_size, dtype=np.int32), position)

    def batches_of(self, rows: WantedRows, position: Position | None = None) -> Iterator[SourcedBatch]:
        """Yield the `rows` of each batch, in the order of `batches`."""
        return self._of(np.arange(self.batch_size, dtype=np.int32)[rows], position)

    def _of(self, rows: np.ndarray, position: Position | None) -> Iterator[SourcedBatch]:
        first = 0 if position is None else position.get("batches")
        if not isinstance(first, int):
            raise DataError(f"the position {position} is of another source; expected a number of batches")
        left = itertools.count(first) if self.num_batches is None else range(first, self.num_batches)
        return (SourcedBatch({"row": rows}, {"batches": number + 1}) for number in left)
