"""Batches drawn and sent to the devices ahead of the loop, by one background thread: the loop waits only for late data."""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import jax

from ..core import Position, Source, SourcedBatch
from ..data import Prefetched, RowSource, prefetch
from ..train.sending import HeldRows, Sender

BATCHES_AHEAD = 2
"""How many batches lie on the devices besides the one that is trained on."""


class Fed(NamedTuple):
    """One global batch on the devices, and where the source stands after it."""

    batch: dict[str, jax.Array]
    position: Position


def feed(source: Source, step: Sender, position: Position | None = None, *, most: int | None = None) -> Prefetched[Fed]:
    """Iterate over a source's batches, each already on its way to the devices when it is asked for.

    In a job of many processes, a `RowSource` makes only the rows that this process's devices hold.

    Args:
        position: Where to go on; None: from the beginning.
        most: How many batches to draw; None: all.

    Raises:
        DataError: The position is of another source. What goes wrong later is raised where its batch would have come,
            with the traceback of the thread.
    """
    held = step.held_rows(source.batch_size) if isinstance(source, RowSource) else None
    if held is None:
        return prefetch(_sent(source.batches(position), step, None, most), BATCHES_AHEAD)
    assert isinstance(source, RowSource)
    return prefetch(_sent(source.batches_of(held.rows, position), step, held, most), BATCHES_AHEAD)


def _sent(batches: Iterator[SourcedBatch], step: Sender, held: HeldRows | None, most: int | None) -> Iterator[Fed]:
    for batch, position in islice(batches, most):
        yield Fed(step.put(batch, held), position)
