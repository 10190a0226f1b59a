"""The source of a mixture: batches with rows of several parts, in proportions given by a schedule."""

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from panax.core.errors import DataError, RecipeError
from panax.core.protocols import Axes, Position, SourcedBatch

from ..text.packing import PackedRow, PackedRowSource, permutation
from ..text.token_source import (
    TEXT_AXES,
    DocumentCounts,
    RowLocations,
    WantedRows,
    assemble,
    check_position,
    gather_rows,
)
from .apportion import UNITS_PER_ROW, apportion, apportion_shares
from .mixture import Mixture


class _State(NamedTuple):
    """Position of a mixture.

    Attributes:
        batch: Number of batches drawn so far.
        rows: Number of rows of each part in these batches.
        owed: Deficit of each part, in `apportion.UNITS_PER_ROW`.
    """

    batch: int
    rows: tuple[int, ...]
    owed: tuple[int, ...]


class MixedSource:
    """Global batches of several parts' rows, independent of the devices and processes.

    Each part has its own order, packing and epochs, from a separate seed: the rows drawn from one do not
    depend on the others. The number of rows of a batch from a part follows its weight to less than a row;
    their positions in the batch are drawn from the seed. The leaves are those of `PackedSource`.

    Weights and `epochs` may change when a run resumes from a position: rows that were read still count.
    """

    owns_memory = True  # of each batch: nothing writes to it after it was yielded

    def __init__(self, mixture: Mixture, parts: Sequence[PackedRowSource], *, batch_size: int, seed: int) -> None:
        """Mix the rows of `parts` as `mixture` requests.

        Raises:
            RecipeError: `batch_size` is less than 1.
        """
        if batch_size < 1:
            raise RecipeError(f"batch_size={batch_size}; expected at least 1")
        self.batch_size = batch_size
        self._parts = mixture.parts
        self._rows = tuple(parts)
        self.tokenizers = _tokenizers_of(parts)
        self._seed = seed
        self._max_rows = [
            None if part.epochs is None else max(round(part.epochs * rows.num_rows), 1)
            for part, rows in zip(self._parts, self._rows, strict=True)
        ]
        self._weights = functools.lru_cache(maxsize=8192)(self._weights_at)

    @property
    def axes(self) -> Mapping[str, Axes]:
        return TEXT_AXES

    @property
    def resume(self) -> Literal["exact", "replay"]:
        return "exact"

    def batches(self, position: Position | None = None) -> Iterator[SourcedBatch]:
        """Yield batches from `position` on; from the beginning if it is None.

        Raises:
            DataError: The position is of other parts, seed, sequence length or batch size, or is not a
                position at all; or, raised at its batch, the parts are exhausted.
        """
        return self.batches_of(range(self.batch_size), position)

    def batches_of(self, rows: WantedRows, position: Position | None = None) -> Iterator[SourcedBatch]:
        """Yield batches as `batches` does, with only `rows` of each global batch.

        Raises:
            DataError: As `batches` does.
        """
        zeros = (0,) * len(self._parts)
        return self._draw(
            _State(0, zeros, zeros) if position is None else self._state(position), np.asarray(rows, np.int64)
        )

    def epochs(self, position: Position) -> Mapping[str, float]:
        """Return the number of passes over each part up to `position`; under "", over all their rows
        together."""
        drawn = self._state(position).rows
        each = {part.name: n / rows.num_rows for part, rows, n in zip(self._parts, self._rows, drawn, strict=True)}
        return {"": sum(drawn) / sum(rows.num_rows for rows in self._rows), **each}

    def count_documents(self, position: Position) -> Mapping[str, DocumentCounts]:
        """Return how often each document of each part has been seen up to `position`, computed from the position
        alone."""
        return {
            part.name: DocumentCounts(n / rows.num_rows, rows.starts, rows.document_counts(*divmod(n, rows.num_rows)))
            for part, rows, n in zip(self._parts, self._rows, self._state(position).rows, strict=True)
        }

    def _draw(self, state: _State, rows: npt.NDArray[np.int64]) -> Iterator[SourcedBatch]:
        while True:
            after = self._next(state)
            locations = self._row_locations(state, after)
            yield SourcedBatch(assemble(self._rows, locations, rows), self._position(after))
            state = after

    def _row_locations(self, before: _State, after: _State) -> RowLocations:
        order = permutation(
            self.batch_size, seed=derive_part_seed(self._seed, ""), epoch=before.batch, purpose="windows"
        )
        part, epoch, index = (np.zeros(self.batch_size, np.int64) for _ in range(3))
        begin = 0
        for number, (first, last) in enumerate(zip(before.rows, after.rows, strict=True)):
            slots = order[begin : begin + last - first]
            part[slots] = number
            epoch[slots], index[slots] = np.divmod(np.arange(first, last), self._rows[number].num_rows)
            begin += last - first
        return RowLocations(part, epoch, index)

    def _next(self, state: _State) -> _State:
        """Compute the number of rows of each part in the next batch.

        If a part is exhausted, the others restart their schedule without deficits.
        """
        remaining = [
            None if max_rows is None else max_rows - n for max_rows, n in zip(self._max_rows, state.rows, strict=True)
        ]
        active = tuple(n is None or n > 0 for n in remaining)
        deficits, rows, need = list(state.owed), list(state.rows), self.batch_size
        if any(amount and not is_active for amount, is_active in zip(deficits, active, strict=True)):
            deficits = [0] * len(deficits)
        while True:
            if not any(self._weights(state.batch, active)):
                raise self._exhausted_error(state, need)
            share = functools.partial(self._share, state.batch, active, need)
            batch_rows = apportion(deficits, share, need)
            over = [n is not None and n < more for n, more in zip(remaining, batch_rows, strict=True)]
            if not any(over):
                due = [before + increment for before, increment in zip(deficits, share(0), strict=True)]
                deficits = [amount - more * UNITS_PER_ROW for amount, more in zip(due, batch_rows, strict=True)]
                rows = [before + more for before, more in zip(rows, batch_rows, strict=True)]
                return _State(state.batch + 1, tuple(rows), tuple(deficits))
            for part in np.flatnonzero(over).tolist():
                rows[part] += remaining[part] or 0
                need -= remaining[part] or 0
            active = tuple(is_active and not used for is_active, used in zip(active, over, strict=True))
            deficits = [0] * len(deficits)

    def _share(self, batch: int, active: tuple[bool, ...], need: int, ahead: int) -> list[int]:
        return apportion_shares(self._weights(batch + ahead, active), self.batch_size if ahead else need)

    def _weights_at(self, batch: int, active: tuple[bool, ...]) -> tuple[float, ...]:
        return tuple(part.weight_at(batch) if some else 0.0 for part, some in zip(self._parts, active, strict=True))

    def _exhausted_error(self, state: _State, need: int) -> DataError:
        ended = [
            f"{part.name!r} after {part.epochs:g} epochs ({max_rows} rows)"
            for part, max_rows in zip(self._parts, self._max_rows, strict=True)
            if part.epochs is not None and max_rows is not None
        ]
        return DataError(
            f"the mixture is used up at step {state.batch}: {', '.join(ended)}; {need} of the {self.batch_size} rows of the "
            "next batch are missing, and no part with a weight is left: raise epochs, or take fewer steps"
        )

    def _position(self, state: _State) -> dict[str, Any]:
        names = [part.name for part in self._parts]
        return {
            "batch": state.batch,
            "rows": dict(zip(names, state.rows, strict=True)),
            "owed": dict(zip(names, state.owed, strict=True)),
            **self._identity(),
        }

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "batch_size": self.batch_size,
            "sequence_length": self._rows[0].sequence_length,
            "parts": {part.name: rows.fingerprint for part, rows in zip(self._parts, self._rows, strict=True)},
        }

    def _state(self, position: Position) -> _State:
        check_position(position, self._identity())
        names = [part.name for part in self._parts]
        try:
            state = _State(
                position["batch"], *(tuple(position[field][name] for name in names) for field in ("rows", "owed"))
            )
            numbers = (state.batch, *state.rows, *state.owed)
            is_valid = all(isinstance(n, int) for n in numbers) and min(state.batch, *state.rows) >= 0
            if is_valid and sum(state.rows) == state.batch * self.batch_size and sum(state.owed) == 0:
                return state
        except (KeyError, TypeError):
            pass
        raise DataError(
            f"the saved data position has batch {position.get('batch')!r} and rows {position.get('rows')!r}; expected "
            f"{self.batch_size} rows for each batch: it is damaged, so restore another checkpoint"
        )


def derive_part_seed(seed: int, name: str) -> int:
    """Return the seed of a part: its draws depend on its name, not on its position in the mixture."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def _tokenizers_of(parts: Sequence[PackedRowSource]) -> frozenset[str]:
    return frozenset().union(*(getattr(rows, "tokenizers", ()) for rows in parts))


class ConcatRows:
    """The rows of several parts concatenated, each part's in its order: the data that a mixture is evaluated
    on."""

    def __init__(self, parts: Sequence[PackedRowSource], *, seed: int) -> None:
        self.seed = seed
        self.num_rows = sum(rows.num_rows for rows in parts)
        self.sequence_length = parts[0].sequence_length
        self.fingerprint = "-and-".join(rows.fingerprint for rows in parts)
        self.starts = np.concatenate([rows.starts for rows in parts])
        self.tokenizers = _tokenizers_of(parts)
        self._parts = tuple(parts)
        self._latest: tuple[int, RowLocations] | None = None

    def row(self, epoch: int, index: int) -> PackedRow:
        part, _, place = (int(leaf[index]) for leaf in self._row_locations(epoch))
        return self._parts[part].row(epoch, place)

    def read_rows(self, epoch: int, indices: npt.NDArray[np.int64], width: int) -> PackedRow:
        places = RowLocations(*(leaf[indices] for leaf in self._row_locations(epoch)))
        return PackedRow(**gather_rows(self._parts, places, width))

    def width(self, epoch: int, indices: npt.NDArray[np.int64]) -> int:
        part, _, place = (leaf[indices] for leaf in self._row_locations(epoch))
        return max(self._parts[p].width(epoch, place[part == p]) for p in np.unique(part).tolist())

    def document_counts(self, epoch: int, index: int) -> npt.NDArray[np.int64]:
        taken = np.bincount(self._row_locations(epoch).part[:index], minlength=len(self._parts))
        return np.concatenate(
            [rows.document_counts(epoch, n) for rows, n in zip(self._parts, taken.tolist(), strict=True)]
        )

    def _row_locations(self, epoch: int) -> RowLocations:
        latest = self._latest
        if latest is None or latest[0] != epoch:
            sizes = np.array([rows.num_rows for rows in self._parts])
            order = permutation(self.num_rows, seed=self.seed, epoch=epoch, purpose="windows")
            part = np.repeat(np.arange(len(sizes)), sizes)[order]
            index = np.zeros(self.num_rows, np.int64)
            index[np.argsort(part, kind="stable")] = np.concatenate([np.arange(size) for size in sizes])
            latest = self._latest = epoch, RowLocations(part, np.full(self.num_rows, epoch), index)
        return latest[1]
