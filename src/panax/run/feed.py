"""Batches read and sent to devices ahead of the loop, by a background thread: it waits only for late data."""

import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import jax
import numpy as np

from ..core import Position, Source
from ..core.errors import LayoutError
from ..data import PrefetchIterator, RowSource
from ..data.loading.batch_ramp import RampedSource
from ..data.loading.pad_rows import pad_batches
from ..train.batch_transfer import HeldRows, Sender

PREFETCH_BATCHES = 2
"""Number of batches on the devices in addition to the one being trained on."""


class DeviceBatch(NamedTuple):
    """A global batch on the devices, the position of the source after it, and its number in the source's
    order, from 1."""

    batch: dict[str, jax.Array]
    position: Position
    number: int


def prefetch_to_device(
    source: Source,
    step: Sender,
    position: Position | None = None,
    *,
    max_batches: int | None = None,
    num_drawn: int = 0,
    skipped: Collection[int] = (),
    evaluates: bool = False,
) -> PrefetchIterator[DeviceBatch]:
    """Iterate over a source's batches, each already on its way to the devices when it is requested.

    In a job of many processes, a `RowSource` makes only the rows that this process's devices hold.

    Args:
        position: Where to resume; None: from the beginning.
        max_batches: Maximum number of batches; None: all.
        num_drawn: Number of batches before `position`.
        skipped: Numbers of batches that are read but not sent.
        evaluates: The data is finite and its last batch may be short: one that the mesh can't hold is skipped
            with a warning.

    Raises:
        DataError: The position is of another source. Later errors are raised when their batch is requested,
            with the traceback of the thread.
    """
    if (
        isinstance(source, RampedSource)
        and isinstance(source.source, RowSource)
        and step.held_rows(source.source.batch_size) is not None
    ):
        batches = _read_ramp(source, step, position)
    else:
        batches = _read_batches(source, step, position)
    # Other sources may reuse the same memory, so that the step has to copy.
    put = functools.partial(step.put, owned=True) if getattr(source, "owns_memory", False) else step.put
    limited_batches = islice(batches, max_batches)
    sent = (
        _send_evaluation_batches(limited_batches, put)
        if evaluates
        else _send_batches(limited_batches, put, num_drawn, skipped)
    )
    return PrefetchIterator(sent, PREFETCH_BATCHES)


class _SourceBatch(NamedTuple):
    """A batch, the source's position after it, and the rows of a global batch that it holds; None for all rows."""

    batch: Mapping[str, np.ndarray]
    position: Position
    held: HeldRows | None


def _read_batches(source: Source, step: Sender, position: Position | None) -> Iterator[_SourceBatch]:
    """Iterate over the batches of a source; of a `RowSource`, over this process's rows, of one size."""
    source = pad_batches(source, step.row_multiple)
    held_rows = step.held_rows(source.batch_size) if isinstance(source, RowSource) else None
    if held_rows is None:
        batches = source.batches(position)
    else:
        assert isinstance(source, RowSource)
        batches = source.batches_of(held_rows.rows, position)
    return (_SourceBatch(batch, after, held_rows) for batch, after in batches)


def _read_ramp(source: RampedSource, step: Sender, position: Position | None) -> Iterator[_SourceBatch]:
    """Iterate over the batches of a ramp; the rows that this process holds change with the batch size."""
    first = _read_batches(source.next_stage(position), step, position)

    def chained(stage: Iterator[_SourceBatch], at: Position | None) -> Iterator[_SourceBatch]:
        while True:
            parts = source.parts_at(at)
            for each in stage:
                at = each.position
                yield each
            # A stage that had all its steps is followed by larger batches; otherwise the data has ended.
            if source.parts_at(at) == parts:
                return
            stage = _read_batches(source.next_stage(at), step, at)

    return chained(first, position)


def _send_batches(
    batches: Iterator[_SourceBatch], put: Callable[..., dict[str, jax.Array]], num_drawn: int, skipped: Collection[int]
) -> Iterator[DeviceBatch]:
    for number, (batch, position, held_rows) in enumerate(batches, start=num_drawn + 1):
        if number not in skipped:
            yield DeviceBatch(put(batch, held_rows), position, number)


def _send_evaluation_batches(
    batches: Iterator[_SourceBatch], put: Callable[..., dict[str, jax.Array]]
) -> Iterator[DeviceBatch]:
    """Send the batches of an evaluation; skip a last one that is too short for the mesh, with a warning."""
    usual = counted = 0
    for number, (batch, position, held_rows) in enumerate(batches, start=1):
        rows = len(next(iter(batch.values())))
        try:
            sent = put(batch, held_rows)
        except LayoutError as error:
            if rows >= usual:
                raise
            warnings.warn(
                f"the evaluation covers {counted} of {counted + rows} held-out rows: the last batch has {rows}, others "
                f"have {usual}, and it is skipped, since the devices can't share it ({error}). Give batches with a last one that "
                f"divides too",
                stacklevel=2,
            )
            continue
        usual, counted = max(usual, rows), counted + rows
        yield DeviceBatch(sent, position, number)
