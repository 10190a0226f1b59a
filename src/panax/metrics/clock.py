"""Breakdown of a step's time: waiting for data, dispatching, waiting for the devices, and the loop's own
work."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator


class StepClock:
    """Accumulator of seconds by name.

    Attributes:
        totals: Seconds by name since the beginning.
    """

    def __init__(self) -> None:
        self.totals: defaultdict[str, float] = defaultdict(float)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._seconds[name] += seconds
            self.totals[name] += seconds

    def tick(self) -> None:
        """Count one more step."""
        self._steps += 1

    @property
    def steps(self) -> int:
        """Return the steps since the last `take` or `restart`."""
        return self._steps

    def take(self) -> dict[str, float]:
        """Return seconds per step by name since the last call, with the total as `step` and the remainder as
        `other`."""
        time_now = time.perf_counter()
        steps = max(self._steps, 1)
        parts = {name: seconds / steps for name, seconds in self._seconds.items()}
        total = (time_now - self._since) / steps
        self._seconds.clear()
        self._steps, self._since = 0, time_now
        return {"step": total, **parts, "other": max(0.0, total - sum(parts.values()))}

    def restart(self) -> None:
        """Discard the measurements since the last call, for example after an evaluation."""
        self._seconds.clear()
        self._steps, self._since = 0, time.perf_counter()
