"""Batches drawn and sent to the devices ahead of the loop, by one background thread: the loop waits only for late data."""

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
from ..train.sending import HeldRows, Sender

PREFETCH_BATCHES = 2
"""How many batches lie on the devices besides the one that is trained on."""


class DeviceBatch(NamedTuple):
    """One global batch on the devices, where the source stands after it, and its place in the source's order, from 1."""

    batch: dict[str, jax.Array]
    position: Position
    number: int


def prefetch_to_device(
    source: Source,
    step: Sender,
    position: Position | None = None,
    *,
    most: int | None = None,
    drawn: int = 0,
    left_out: Collection[int] = (),
    evaluates: bool = False,
) -> PrefetchIterator[DeviceBatch]:
    """Iterate over a source's batches, each already on its way to the devices when it is asked for.

    In a job of many processes, a `RowSource` makes only the rows that this process's devices hold.

    Args:
        position: Where to go on; None: from the beginning.
        most: How many batches to draw; None: all.
        drawn: How many batches lie before `position`.
        left_out: The numbers of batches that are drawn, and not given.
        evaluates: The data is finite and its last batch may be short: one that the mesh can't hold is left out with a warning.

    Raises:
        DataError: The position is of another source. What goes wrong later is raised where its batch would have come,
            with the traceback of the thread.
    """
    if (
        isinstance(source, RampedSource)
        and isinstance(source.source, RowSource)
        and step.held_rows(source.source.batch_size) is not None
    ):
        batches = _by_stage(source, step, position)
    else:
        batches = _of_size(source, step, position)
    # Of other sources a step takes a copy, as they may fill the same memory again.
    put = functools.partial(step.put, owned=True) if getattr(source, "owns_memory", False) else step.put
    taken = islice(batches, most)
    sent = _sent_to_evaluate(taken, put) if evaluates else _sent(taken, put, drawn, left_out)
    return PrefetchIterator(sent, PREFETCH_BATCHES)


class _Drawn(NamedTuple):
    """A batch, where the source stands after it, and which rows of a global batch it is; None: all."""

    batch: Mapping[str, np.ndarray]
    position: Position
    held: HeldRows | None


def _of_size(source: Source, step: Sender, position: Position | None) -> Iterator[_Drawn]:
    """The batches of a source; of a `RowSource` the rows that this process holds, which are of one size."""
    source = pad_batches(source, step.row_multiple)
    held = step.held_rows(source.batch_size) if isinstance(source, RowSource) else None
    if held is None:
        batches = source.batches(position)
    else:
        assert isinstance(source, RowSource)
        batches = source.batches_of(held.rows, position)
    return (_Drawn(batch, after, held) for batch, after in batches)


def _by_stage(source: RampedSource, step: Sender, position: Position | None) -> Iterator[_Drawn]:
    """The batches of a ramp, of which this process holds other rows where the size changes."""
    first = _of_size(source.next_stage(position), step, position)

    def chained(stage: Iterator[_Drawn], at: Position | None) -> Iterator[_Drawn]:
        while True:
            parts = source.parts_at(at)
            for each in stage:
                at = each.position
                yield each
            # A stage that has all its steps is followed by larger batches; else the data has ended.
            if source.parts_at(at) == parts:
                return
            stage = _of_size(source.next_stage(at), step, at)

    return chained(first, position)


def _sent(
    batches: Iterator[_Drawn], put: Callable[..., dict[str, jax.Array]], drawn: int, left_out: Collection[int]
) -> Iterator[DeviceBatch]:
    for number, (batch, position, held) in enumerate(batches, start=drawn + 1):
        if number not in left_out:
            yield DeviceBatch(put(batch, held), position, number)


def _sent_to_evaluate(batches: Iterator[_Drawn], put: Callable[..., dict[str, jax.Array]]) -> Iterator[DeviceBatch]:
    """The batches of an evaluation; a last one that is too short for the mesh is named as missing."""
    usual = counted = 0
    for number, (batch, position, held) in enumerate(batches, start=1):
        rows = len(next(iter(batch.values())))
        try:
            sent = put(batch, held)
        except LayoutError as error:
            if rows >= usual:
                raise
            warnings.warn(
                f"the evaluation is over {counted} of {counted + rows} held-out rows: the last batch has {rows}, where others "
                f"have {usual}, and is left out, since the devices can't share it ({error}). Give batches whose last one "
                f"divides too",
                stacklevel=2,
            )
            continue
        usual, counted = max(usual, rows), counted + rows
        yield DeviceBatch(sent, position, number)
