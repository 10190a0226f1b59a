"""Simulated lives of a run, failure by failure, from a seeded random generator.

They verify the closed form, and show the variation between runs.
"""

import dataclasses
import heapq
import math

import numpy as np

from ...core.errors import RecipeError
from .fleet import SECONDS_PER_DAY, Fleet, check_together
from .stages import StageTimes

MAX_LIVES = 10_000
MAX_FAILURES = 30_000
"""Maximum number of failures in all lives together: with more, lives are shorter than the run."""


@dataclasses.dataclass(frozen=True)
class Lives:
    """Results of several simulated lives.

    Attributes:
        count: Number of lives.
        days: Duration of each: that of the run, but limited to 30,000 failures in all lives together.
        goodput: Mean goodput.
        standard_error: Standard error of the mean.
        low, high: 5th and 95th percentile of the lives.
        restart: Mean share of the time from failures to the next steps.
        failures_per_day: Mean number of failures per day.
    """

    count: int
    days: float
    goodput: float
    standard_error: float
    low: float
    high: float
    restart: float
    failures_per_day: float


def simulate_lives(stages: StageTimes, fleet: Fleet, *, count: int = 64, seed: int = 0) -> Lives:
    """Simulate lives of a run.

    Args:
        count: Number of lives, at least 2.

    Raises:
        RecipeError: The interval is longer than the run; or the count or the seed is invalid.
    """
    check_together(stages, fleet)
    if isinstance(count, bool) or not isinstance(count, int) or not 2 <= count <= MAX_LIVES:
        raise RecipeError(f"lives={count!r}: expected a whole number from 2 to {MAX_LIVES}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise RecipeError(f"seed={seed!r}: expected a whole number from 0")
    # If hundreds of failures occur before the first checkpoint, a shorter life loses nothing.
    rate = fleet.failures_per_second
    end = min(fleet.days * SECONDS_PER_DAY, MAX_FAILURES / count / rate if rate else math.inf)
    lives = [_Life(stages, fleet, end, np.random.default_rng([seed, number])) for number in range(count)]
    for life in lives:
        life.run()
    goodput = np.array([life.goodput for life in lives])
    low, high = np.quantile(goodput, (0.05, 0.95))
    return Lives(
        count=count,
        days=end / SECONDS_PER_DAY,
        goodput=float(goodput.mean()),
        standard_error=float(goodput.std(ddof=1) / math.sqrt(count)),
        low=float(low),
        high=float(high),
        restart=float(np.mean([life.restarting / life.now for life in lives])),
        failures_per_day=float(np.mean([life.failures / life.now * SECONDS_PER_DAY for life in lives])),
    )


class _Life:
    """One life. Positions are steps; `kept` is the position that the store would restore, `copied` the one
    that memory would."""

    def __init__(self, stages: StageTimes, fleet: Fleet, end: float, random: np.random.Generator):
        self.stages, self.fleet, self.random, self.end = stages, fleet, random, end
        self.recovery, self.destroys = fleet.recovery(stages), fleet.destroys_copies(stages)
        self.unit = stages.copy_every or stages.every
        self.now = self.restarting = 0.0
        self.position = self.kept = self.copied = self.failures = 0
        self.pending: tuple[int, float] | None = None
        self.away = 0
        self.returning: list[float] = []
        self.fails_at = self._next_failure()
        self.stops_at = self._next_stop()

    @property
    def goodput(self) -> float:
        return self.position * self.stages.step / self.now

    def run(self) -> None:
        while self.now < self.end:
            self._skip_whole_cycles()
            self._skip_copies()
            if not self._train_one_unit():
                self._recover()

    def _next_failure(self) -> float:
        rate = self.fleet.failures_per_second
        return self.now + self.random.exponential(1 / rate) if rate else math.inf

    def _next_stop(self) -> float:
        rate = self.fleet.planned_stops_per_day / SECONDS_PER_DAY
        return self.now + self.random.exponential(1 / rate) if rate else math.inf

    def _passes(self, seconds: float) -> bool:
        """Advance the time; return False if a failure occurs first."""
        if self.now + seconds > self.fails_at:
            self._commit_until(self.fails_at)
            self.now = self.fails_at
            return False
        self.now += seconds
        return True

    def _commit_until(self, moment: float) -> None:
        if self.pending is not None and self.pending[1] <= moment:
            self.kept, self.pending = self.pending[0], None

    def _train_one_unit(self) -> bool:
        stages = self.stages
        speed = 1 - self.away * self.fleet.devices_per_host / self.fleet.devices
        if not self._passes(self.unit * stages.step_with_waits / max(speed, 1e-3)):
            return False
        if stages.copy_every:
            if not self._passes(stages.copy_stall):
                return False
            self.copied = self.position + self.unit
        self.position += self.unit
        return self._save() if self.position % stages.every == 0 else True

    def _save(self) -> bool:
        if self.pending is not None and not self._passes(max(self.pending[1] - self.now, 0.0)):
            return False
        self._commit_until(self.now)
        if not self._passes(self.stages.stall):
            return False
        self.pending = (self.position, self.now + self.stages.commit)
        self._commit_until(self.now)
        if self.stops_at <= self.now:
            self.pending, self.kept = None, self.position
            pause = self.fleet.planned(self.stages)
            # No processes of the run exist that could fail meanwhile.
            self.now, self.fails_at = self.now + pause, self.fails_at + pause
            self.stops_at = self._next_stop()
        return self._grow()

    def _grow(self) -> bool:
        """Add the hosts that have been replaced to the run again."""
        before = self.now
        back = 0
        while self.returning and self.returning[0] <= self.now:
            heapq.heappop(self.returning)
            back += 1
        if not back:
            return True
        # A save in flight is finished first, as in any planned stop.
        self.pending, self.kept = None, self.position
        self.away -= back
        passed = self._passes(self.fleet.planned(self.stages, of_recovery=True))
        self.restarting += self.now - before
        return passed

    def _recover(self) -> None:
        began = self.now
        destroyed = self._fail()
        while not self._passes(self.recovery) and self.now < self.end:
            destroyed |= self._fail()
        self.position = self.copied = self.copied if self.stages.copy_every and not destroyed else self.kept
        self.restarting += self.now - began

    def _fail(self) -> bool:
        """Count a failure; return True if it destroyed the copies."""
        self.failures += 1
        self.pending = None
        self.fails_at = self._next_failure()
        if self.fleet.shrinks and (self.away + 2) * self.fleet.devices_per_host <= self.fleet.devices:
            self.away += 1
            heapq.heappush(self.returning, self.now + self.fleet.replacement)
        return bool(self.random.random() < self.destroys) if self.stages.copy_every else False

    def _skip_copies(self) -> None:
        """Skip ahead to the last copy before the next checkpoint, if no event occurs before."""
        unit = self.unit * self.stages.step_with_waits + self.stages.copy_stall
        num_copies = (self.stages.every - self.position % self.stages.every) // self.unit - 1
        if self.away or num_copies <= 0:
            return
        count = min(int((min(self.fails_at, self.end) - self.now) / unit), num_copies)
        if count > 0:
            self.now += count * unit
            self.position += count * self.unit
            self.copied = self.position
            self._commit_until(self.now)

    def _skip_whole_cycles(self) -> None:
        """Skip whole cycles from checkpoint to checkpoint, until the next failure, planned stop or end of the run."""
        stages = self.stages
        if self.away or self.position % stages.every or self.position != (self.pending or (self.kept, 0.0))[0]:
            return
        units = stages.every // self.unit
        work = stages.interval + units * stages.copy_stall
        # In its steady state, one cycle waits for the commit of the previous one.
        cycle = max(work, stages.commit if self.pending else 0.0) + stages.stall
        count = int((min(self.fails_at, self.stops_at, self.end) - self.now) / cycle) - 1
        if count <= 0 or (self.pending is None and stages.commit > 0):
            return
        self.now += count * cycle
        self.position += count * stages.every
        self.copied = self.position
        if self.pending is None:
            self.kept = self.position
        else:
            self.kept, self.pending = self.position - stages.every, (self.position, self.now + stages.commit)
