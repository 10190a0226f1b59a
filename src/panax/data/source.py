"""The source of token batches: global batches in an order fixed by the seed, from any position on."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal

import numpy as np

from panax.core.errors import DataError, RecipeError
from panax.core.protocols import Axes, Position, SourcedBatch

from .packing import Row, Rows

_DTYPES = {
    "tokens": np.int32, "targets": np.int32, "loss_mask": np.float32, "segment": np.int32, "position": np.int32,
}  # fmt: skip
_AXES: Mapping[str, Axes] = MappingProxyType(dict.fromkeys(Row._fields, ("batch", "seq")))


class PackedSource:
    """Global batches of token rows, the same whatever the devices and processes are.

    A batch has the leaves tokens, targets, segment, position (int32) and loss_mask (float32), each (batch, seq). Where
    segment is 0 there is padding, and loss_mask is 0 too.

    Without an end, a batch that reaches past an epoch goes on in the next one, so that no batch is short. With
    `epochs`, the last batch is filled up with rows of padding, so that its shape is that of the others.

    Attributes:
        num_batches: How many batches there are; None without an end.
    """

    def __init__(self, rows: Rows, *, batch_size: int, epochs: int | None = None) -> None:
        """Draw batches of `batch_size` rows, for `epochs` epochs or without an end.

        Raises:
            RecipeError: `batch_size` or `epochs` is less than 1.
        """
        if batch_size < 1 or (epochs is not None and epochs < 1):
            raise RecipeError(f"batch_size={batch_size}, epochs={epochs}; expected at least 1")
        self.rows = rows
        self.batch_size = batch_size
        self._total = None if epochs is None else epochs * rows.num_rows
        self.num_batches = None if self._total is None else -(-self._total // batch_size)

    @property
    def axes(self) -> Mapping[str, Axes]:
        return _AXES

    @property
    def resume(self) -> Literal["exact", "replay"]:
        return "exact"

    def batches(self, position: Position | None = None, *, rows: slice | None = None) -> Iterator[SourcedBatch]:
        """Yield batches from `position` on; from the beginning when it is None.

        Args:
            position: What came with an earlier batch.
            rows: Which rows of each global batch to make, for a process that holds only those; None: all.

        Raises:
            DataError: The position is of another corpus, seed, sequence length or batch size, or is none at all.
        """
        return self._draw(0 if position is None else self._start(position), range(self.batch_size)[rows or slice(None)])

    def _position(self, start: int) -> dict[str, int | str]:
        epoch, index = divmod(start, self.rows.num_rows)
        return {"epoch": epoch, "index": index, **self._identity()}

    def _identity(self) -> dict[str, int | str]:
        return {
            "seed": self.rows.seed,
            "batch_size": self.batch_size,
            "sequence_length": self.rows.sequence_length,
            "fingerprint": self.rows.fingerprint,
        }

    def _start(self, position: Position) -> int:
        names = {"fingerprint": "corpus", "sequence_length": "sequence length", "batch_size": "batch size"}
        for name, ours in self._identity().items():
            if position.get(name) != ours:
                raise DataError(
                    f"the saved data position is of another {names.get(name, name)}: {name} {position.get(name)!r} was "
                    f"saved, this source has {ours!r}; restore with the data the run began with, or start the data anew"
                )
        epoch, index = position.get("epoch"), position.get("index")
        if not (isinstance(epoch, int) and isinstance(index, int) and epoch >= 0 and 0 <= index < self.rows.num_rows):
            limits = f"0 <= epoch and 0 <= index < {self.rows.num_rows}"
            raise DataError(f"the saved data position has epoch {epoch!r} and index {index!r}; expected {limits}")
        return epoch * self.rows.num_rows + index

    def _draw(self, start: int, rows: range) -> Iterator[SourcedBatch]:
        while self._total is None or start < self._total:
            end = start + self.batch_size if self._total is None else min(start + self.batch_size, self._total)
            yield SourcedBatch(self._batch(start, end, rows), self._position(end))
            start = end

    def _batch(self, start: int, end: int, rows: range) -> dict[str, np.ndarray]:
        # The width is that of the global batch, so that each process makes the same shape.
        epochs, indices = np.divmod(np.arange(start, end), self.rows.num_rows)
        width = max(self.rows.width(int(epoch), indices[epochs == epoch]) for epoch in np.unique(epochs))
        batch = {name: np.zeros((len(rows), width), dtype) for name, dtype in _DTYPES.items()}
        for slot, offset in enumerate(rows):
            if start + offset < end:
                row = self.rows.row(int(epochs[offset]), int(indices[offset]))
                for name, values in row._asdict().items():
                    batch[name][slot, : len(values)] = values
        return batch
