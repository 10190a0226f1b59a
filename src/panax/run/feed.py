"""Batches drawn and sent to the devices ahead of the loop, by one background thread: the loop waits only for late data."""

from collections.abc import Collection, Iterator
from itertools import islice
from typing import NamedTuple

import jax

from ..core import Position, Source, SourcedBatch
from ..data import Prefetched, RowSource, prefetch
from ..data.filled import filled
from ..train.sending import HeldRows, Sender

BATCHES_AHEAD = 2
"""How many batches lie on the devices besides the one that is trained on."""


class Fed(NamedTuple):
    """One global batch on the devices, where the source stands after it, and its place in the source's order, from 1."""

    batch: dict[str, jax.Array]
    position: Position
    number: int


def feed(
    source: Source,
    step: Sender,
    position: Position | None = None,
    *,
    most: int | None = None,
    drawn: int = 0,
    left_out: Collection[int] = (),
) -> Prefetched[Fed]:
    """Iterate over a source's batches, each already on its way to the devices when it is asked for.

    In a job of many processes, a `RowSource` makes only the rows that this process's devices hold.

    Args:
        position: Where to go on; None: from the beginning.
        most: How many batches to draw; None: all.
        drawn: How many batches lie before `position`.
        left_out: The numbers of batches that are drawn, and not given.

    Raises:
        DataError: The position is of another source. What goes wrong later is raised where its batch would have come,
            with the traceback of the thread.
    """
    source = filled(source, step.rows_divide)
    held = step.held_rows(source.batch_size) if isinstance(source, RowSource) else None
    if held is None:
        batches = source.batches(position)
    else:
        assert isinstance(source, RowSource)
        batches = source.batches_of(held.rows, position)
    return prefetch(_sent(islice(batches, most), step, held, drawn, left_out), BATCHES_AHEAD)


def _sent(
    batches: Iterator[SourcedBatch], step: Sender, held: HeldRows | None, drawn: int, left_out: Collection[int]
) -> Iterator[Fed]:
    for number, (batch, position) in enumerate(batches, start=drawn + 1):
        if number not in left_out:
            yield Fed(step.put(batch, held), position, number)
