"""Differences between the clocks of a job's processes, from barriers that all of them pass together.

No process leaves a barrier before the last one has entered it. So for each barrier there is a moment between
entering and leaving on every process's clock, which bounds the difference of any two clocks from both sides.
Several barriers in a row narrow the bounds to about one round trip to the coordinator, whatever the number of
processes.
"""

import itertools
import time
from collections.abc import Sequence

from ..core.jax_internals import coordination_client

BARRIERS = 12

_SECONDS = 120
"""Time for the other processes to reach a barrier."""

_numbers = itertools.count()

Passage = tuple[float, float]
"""Times at which a process entered a barrier and left it, by its own clock."""


def record_passages() -> list[Passage]:
    """Pass several barriers with all other processes, and return the times; empty for a single process."""
    client = coordination_client()
    if client is None:
        return []
    check, passages = next(_numbers), []
    for number in range(BARRIERS):
        entered = time.time()
        client.wait_at_barrier(f"panax-check-{check}-{number}", _SECONDS * 1000)
        passages.append((entered, time.time()))
    return passages


def estimate_offset(passed: Sequence[Passage], reference: Sequence[Passage]) -> tuple[float, float]:
    """Return (seconds by which a clock is ahead of a reference, error bound of that offset in seconds).

    >>> estimate_offset([(10.0, 10.2), (11.1, 11.3)], [(0.1, 0.2), (1.0, 1.2)])
    (10.0, 0.1)
    """
    low = max((entered - left for (entered, _), (_, left) in zip(passed, reference)), default=0.0)
    high = min((left - entered for (_, left), (entered, _) in zip(passed, reference)), default=0.0)
    if low > high:
        # A clock was set between two barriers: no single offset explains both.
        low, high = high, low
    return round((low + high) / 2, 6), round((high - low) / 2, 6)
