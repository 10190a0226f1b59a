"""The source of token batches: global batches in an order fixed by the seed, starting at any position."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from panax.core.errors import DataError, RecipeError
from panax.core.protocols import Axes, Position, Source, SourcedBatch

from .packing import PackedRow, PackedRowSource

TEXT_LEAVES = {
    "tokens": np.int32, "targets": np.int32, "loss_mask": np.float32, "segment": np.int32, "position": np.int32,
}  # fmt: skip
"""The leaves of a text batch, each (batch, seq)."""

TEXT_AXES: Mapping[str, Axes] = MappingProxyType(dict.fromkeys(PackedRow._fields, ("batch", "seq")))


def row_leaves(rows: PackedRowSource) -> Mapping[str, Any]:
    """Return the leaves of a batch of these rows, by name, with the dtype of each: one with a shape if it has several values
    for each position.
    """
    return getattr(rows, "leaves", TEXT_LEAVES)


def leaf_axes(leaves: Mapping[str, Any]) -> Mapping[str, Axes]:
    """Return the logical axes of a text batch's leaves, given their dtypes."""
    inner = {name: ("candidate",) * len(np.dtype(dtype).shape) for name, dtype in leaves.items()}
    return MappingProxyType({name: ("batch", "seq", *axes) for name, axes in inner.items()})


WantedRows = Sequence[int] | npt.NDArray[np.integer]
"""Indices of the rows to make of each global batch, ascending."""


@runtime_checkable
class RowSource(Source, Protocol):
    """A source that can make a subset of the rows of its global batches, for a process with devices that hold
    only those.

    Attributes:
        batch_size: Number of rows of a global batch.
    """

    batch_size: int

    def batches_of(self, rows: WantedRows, position: Position | None = None) -> Iterator[SourcedBatch]:
        """Yield `batches` with only `rows` of each; other dimensions are those of the global batch."""
        ...


class DocumentCounts(NamedTuple):
    """Counts of how often the documents of a part have been seen.

    Attributes:
        epochs: Number of passes over the part, the current one as the fraction of its rows that is done.
        documents: Offset of each document in the part's token file, in tokens.
        times: How often each document has been read to its end.
    """

    epochs: float
    documents: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]


@runtime_checkable
class Accounting(Protocol):
    """A source that computes, from a position alone, how often each document of each part was seen; the only part
    of a source is named "".
    """

    def epochs(self, position: Position) -> Mapping[str, float]: ...

    def count_documents(self, position: Position) -> Mapping[str, DocumentCounts]: ...


class PackedSource:
    """Source of global batches of token rows, independent of the number of devices and processes.

    A batch has the leaves tokens, targets, segment, position (int32) and loss_mask (float32), each (batch,
    seq). Padding has segment 0 and loss_mask 0.

    An endless source continues a batch that reaches past an epoch with rows of the next one, so that no batch
    is short. With `epochs`, the last batch is filled with padding rows, so that all batches have the same
    shape.

    Attributes:
        num_batches: Number of batches; None if endless.
    """

    owns_memory = True  # of each batch: nothing writes to it after it was yielded

    def __init__(self, rows: PackedRowSource, *, batch_size: int, epochs: int | None = None) -> None:
        """Draw batches of `batch_size` rows, for `epochs` epochs or endlessly.

        Raises:
            RecipeError: `batch_size` or `epochs` is less than 1.
        """
        if batch_size < 1 or (epochs is not None and epochs < 1):
            raise RecipeError(f"batch_size={batch_size}, epochs={epochs}; expected at least 1")
        self.rows = rows
        self.tokenizers: frozenset[str] = getattr(rows, "tokenizers", frozenset())
        self.batch_size = batch_size
        self._total = None if epochs is None else epochs * rows.num_rows
        self.num_batches = None if self._total is None else -(-self._total // batch_size)

    @property
    def axes(self) -> Mapping[str, Axes]:
        return leaf_axes(row_leaves(self.rows))

    @property
    def resume(self) -> Literal["exact", "replay"]:
        return "exact"

    def batches(self, position: Position | None = None) -> Iterator[SourcedBatch]:
        """Yield batches from `position` on, or from the beginning if it is None.

        Raises:
            DataError: The position is invalid, or is of another corpus, seed, sequence length or batch size.
        """
        return self.batches_of(range(self.batch_size), position)

    def batches_of(self, rows: WantedRows, position: Position | None = None) -> Iterator[SourcedBatch]:
        """Yield `batches` with only `rows` of each global batch.

        Raises:
            DataError: As `batches` does.
        """
        return self._draw(0 if position is None else self._start(position), np.asarray(rows, np.int64))

    def epochs(self, position: Position) -> Mapping[str, float]:
        """Return the number of passes over the documents up to `position`."""
        return {"": self._start(position) / self.rows.num_rows}

    def count_documents(self, position: Position) -> Mapping[str, DocumentCounts]:
        """Count how often each document has been seen up to `position`, computed from the position alone."""
        start = self._start(position)
        times = self.rows.document_counts(*divmod(start, self.rows.num_rows))
        return {"": DocumentCounts(start / self.rows.num_rows, self.rows.starts, times)}

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
        check_position(position, self._identity())
        epoch, index = position.get("epoch"), position.get("index")
        if not (isinstance(epoch, int) and isinstance(index, int) and epoch >= 0 and 0 <= index < self.rows.num_rows):
            limits = f"0 <= epoch and 0 <= index < {self.rows.num_rows}"
            raise DataError(f"the saved data position has epoch {epoch!r} and index {index!r}; expected {limits}")
        return epoch * self.rows.num_rows + index

    def _draw(self, start: int, rows: npt.NDArray[np.int64]) -> Iterator[SourcedBatch]:
        while self._total is None or start < self._total:
            end = start + self.batch_size
            number = np.arange(start, end)
            part = np.zeros(self.batch_size, np.int64)
            if self._total is not None and end > self._total:
                part[number >= self._total] = PADDING
                end = self._total
            locations = RowLocations(part, *np.divmod(number, self.rows.num_rows))
            yield SourcedBatch(assemble((self.rows,), locations, rows), self._position(end))
            start = end


RESTORE_ADVICE = "; restore with the data the run began with, or start the data over"
"""Default advice of `check_position`'s message."""


def check_position(position: Position, ours: Mapping[str, object]) -> None:
    """Check that a position is of this source's order.

    Raises:
        DataError: A setting that determines the order differs.
    """
    names = {"fingerprint": "corpus", "sequence_length": "sequence length", "batch_size": "batch size"}
    for name, value in ours.items():
        if position.get(name) != value:
            raise DataError(
                f"the saved data position is of another {names.get(name, name)}: {name} {position.get(name)!r} was "
                f"saved, this source has {value!r}{RESTORE_ADVICE}"
            )


PADDING = -1


class RowLocations(NamedTuple):
    """The origin of each row of a global batch.

    Attributes:
        part: Index of the row source; `PADDING` for an empty row.
        epoch: Epoch of that part.
        row: Index of the row in the epoch.
    """

    part: npt.NDArray[np.int64]
    epoch: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]


def assemble(
    parts: Sequence[PackedRowSource], locations: RowLocations, rows: npt.NDArray[np.int64]
) -> dict[str, np.ndarray]:
    """Read `rows` of a global batch, with the width of the global batch so that shapes agree on all processes."""
    width = max(parts[part].width(epoch, locations.row[slots]) for part, epoch, slots in _groups(locations))
    return gather_rows(parts, RowLocations(*(leaf[rows] for leaf in locations)), width)


def gather_rows(parts: Sequence[PackedRowSource], locations: RowLocations, width: int) -> dict[str, np.ndarray]:
    """Read rows of several parts and epochs, padded to `width` tokens."""
    num_rows = len(locations.part)
    batch: dict[str, np.ndarray] | None = None
    for part, epoch, slots in _groups(locations):
        if len(slots) == num_rows:
            return parts[part].read_rows(epoch, locations.row, width)._asdict()
        rows = parts[part].read_rows(epoch, locations.row[slots], width)._asdict()
        batch = batch or _empty(parts, num_rows, width)
        for name, leaf in rows.items():
            batch[name][slots] = leaf
    return batch or _empty(parts, num_rows, width)


def _empty(parts: Sequence[PackedRowSource], rows: int, width: int) -> dict[str, np.ndarray]:
    return {name: np.zeros((rows, width), dtype) for name, dtype in row_leaves(parts[0]).items()}


def _groups(locations: RowLocations) -> Iterator[tuple[int, int, npt.NDArray[np.int64]]]:
    """Yield (part, epoch, indices in the batch) of the rows that have a part and epoch in common."""
    if not len(locations.part):
        return
    part, epoch = int(locations.part[0]), int(locations.epoch[0])
    if part != PADDING and (locations.part == part).all() and (locations.epoch == epoch).all():
        yield part, epoch, np.arange(len(locations.part))
        return
    for part in np.unique(locations.part).tolist():
        if part != PADDING:
            of_part = np.flatnonzero(locations.part == part)
            epochs = locations.epoch[of_part]
            for epoch in np.unique(epochs).tolist():
                yield part, epoch, of_part[epochs == epoch]
