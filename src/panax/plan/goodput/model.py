"""Closed form of goodput: the average use of a run's time, and the optimal checkpoint interval.

Failures occur at a constant rate `rate`. After each one the run recovers, which takes R seconds, or longer if
there is another failure meanwhile; then it trains until the next failure. With w seconds of work between
checkpoints that stall it for d seconds and are committed c seconds later, the number of checkpoints committed
between two failures is geometric; with T = w + d its mean is

    exp(-rate * c) / (exp(rate * T) - 1),

and the mean time from one recovery's end to the next one's is exp(rate * R) / rate. Without c this is Daly's
model.

Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps (2006).
Difference: the commit is asynchronous; a failure before it falls back to the previous checkpoint.
"""

import dataclasses
import math
from collections.abc import Mapping

from .fleet import SECONDS_PER_DAY, Fleet, check_together
from .stages import StageTimes

FEWER_DEVICES = "fewer devices"
PRODUCTIVE_KINDS = ("training", "data wait", "evaluation", FEWER_DEVICES)
MIN_CHECKPOINTS = 0.5
"""A run with fewer expected commits than this in its whole duration does not advance."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Average use of a run's time.

    Attributes:
        devices: Number of devices.
        every: Steps between two checkpoints.
        interval: Seconds of work between them.
        shares: Shares of the run's time, by the kinds of its ledger (`metrics.goodput.KINDS`); they add up to
            1. "fewer devices" is the work that missing devices would have done. Planned stops are "start".
        failures_per_day: Expected number of failures per day.
        recovery: Seconds from a failure to the first step after it.
        lost_per_failure: Seconds of work that a failure costs, on average.
        advances: True if the expected number of commits in the whole run reaches `MIN_CHECKPOINTS`;
            otherwise `goodput` is 0.
    """

    devices: int
    every: int
    interval: float
    shares: Mapping[str, float]
    failures_per_day: float
    recovery: float
    lost_per_failure: float
    advances: bool

    @property
    def goodput(self) -> float:
        """Return the fraction of the time spent on steps that are part of the final run."""
        return self.shares["training"]

    @property
    def ettr(self) -> float:
        """Return the effective training time ratio: the share of the time in which the run makes progress, on
        any number of devices."""
        return sum(self.shares[kind] for kind in PRODUCTIVE_KINDS)

    @property
    def seconds_between_failures(self) -> float:
        """Return the mean time between failures; infinite if nothing fails."""
        return SECONDS_PER_DAY / self.failures_per_day if self.failures_per_day else math.inf


def forecast(stages: StageTimes, fleet: Fleet) -> Forecast:
    """Compute the average use of a run's time.

    Exact for failures at a constant rate, without copies in memory and shrinking. Both are modeled to first
    order; the tests compare them with simulated lives.

    Raises:
        RecipeError: The interval is longer than the run, or planned stops take all the time.
    """
    check_together(stages, fleet)
    rate, recovery = fleet.failures_per_second, fleet.recovery(stages)
    training_time = _exp(-rate * recovery)
    steps, waits, lost = (_with_copies if stages.copy_every else _without_copies)(stages, fleet)
    shares = {
        "training": steps * stages.step,
        "start": 0.0,
        "data wait": steps * stages.data_wait,
        "checkpoint wait": waits,
        "evaluation": steps * stages.evaluation,
        "lost work": lost,
        "restart": 1.0 - training_time,
        FEWER_DEVICES: 0.0,
    }
    if fleet.shrinks:
        _shrink(shares, stages, fleet, rate * training_time)
    planned = fleet.planned_stops_per_day * fleet.planned(stages) / SECONDS_PER_DAY
    shares = {kind: share * (1 - planned) for kind, share in shares.items()}
    shares["start"] += planned
    advances = steps * (1 - planned) * fleet.days * SECONDS_PER_DAY >= MIN_CHECKPOINTS * stages.every
    if not advances:
        productive = (*PRODUCTIVE_KINDS, "checkpoint wait")
        shares["lost work"] += sum(shares[kind] for kind in productive)
        shares |= dict.fromkeys(productive, 0.0)
    return Forecast(
        devices=fleet.devices,
        every=stages.every,
        interval=stages.interval,
        shares=shares,
        failures_per_day=rate * SECONDS_PER_DAY,
        recovery=recovery,
        lost_per_failure=shares["lost work"] / rate if rate else 0.0,
        advances=advances,
    )


def _exp(power: float) -> float:
    return math.exp(max(power, -745.0))


def _without_copies(stages: StageTimes, fleet: Fleet) -> tuple[float, float, float]:
    """Return (committed steps, their checkpoints' stalls in seconds, seconds of lost work), each per second
    of the run."""
    rate = fleet.failures_per_second
    work, commit = stages.interval, stages.commit
    held_up = max(commit - work, 0.0)
    first, cycle = work + stages.stall, work + stages.stall + held_up
    if rate * cycle < 1e-12:
        return stages.every / cycle, (cycle - work) / cycle, 0.0
    training_time = _exp(-rate * fleet.recovery(stages))
    # The first checkpoint after a recovery waits for no other one.
    one = _exp(-rate * (commit + first))
    committed = one / -math.expm1(-rate * cycle)
    checkpoints = rate * training_time * committed
    waits = checkpoints * (cycle - work) - rate * training_time * one * held_up
    return checkpoints * stages.every, waits, max(training_time - checkpoints * work - waits, 0.0)


def _with_copies(stages: StageTimes, fleet: Fleet) -> tuple[float, float, float]:
    """Return the figures of `_without_copies` for failures that fall back to the newest copy, or to the store
    if the failure destroyed the copies."""
    rate, recovery = fleet.failures_per_second, fleet.recovery(stages)
    copies = stages.every // stages.copy_every
    work = stages.copy_every * stages.step_with_waits
    held_up = max(stages.commit - copies * (work + stages.copy_stall), 0.0)
    wait = stages.copy_stall + (stages.stall + held_up) / copies
    unit = work + wait
    if rate * unit < 1e-12:
        return stages.copy_every / unit, wait / unit, 0.0
    training_time = _exp(-rate * recovery)
    success_probability = _exp(-rate * unit)
    # There may also be a failure during the recovery: a single failure that destroys the copies is enough.
    spares = 1 - fleet.destroys_copies(stages)
    destroyed = 1 - training_time * spares / (1 - (1 - training_time) * spares)
    units = success_probability / -math.expm1(-rate * unit)
    if destroyed:
        advances = success_probability / (success_probability - math.expm1(-rate * unit) * destroyed)
        behind = _mean_remainder(advances, copies) + (_exp(rate * stages.commit) - 1) * copies + stages.commit / unit
        units = max(units - destroyed * behind, 0.0)
    done = rate * training_time * units
    return done * stages.copy_every, done * wait, max(training_time - done * unit, 0.0)


def _mean_remainder(again: float, size: int) -> float:
    """Return the mean of `count % size` for a count that grows by one with probability `again`, and otherwise
    ends."""
    if again >= 1:
        return (size - 1) / 2
    full_cycles = again**size
    return again / (1 - again) - size * full_cycles / (1 - full_cycles)


def _shrink(shares: dict[str, float], stages: StageTimes, fleet: Fleet, recoveries: float) -> None:
    """Account for the missing devices after each failure until a host is replaced, and for the planned restart
    at that time."""
    growing = recoveries * fleet.planned(stages, of_recovery=True)
    for kind in shares:
        shares[kind] /= 1 + growing
    shares["restart"] += growing / (1 + growing)
    # By Little's law; a host also waits for the next checkpoint before it is used.
    away = fleet.replacement + stages.interval / 2
    missing = min(recoveries * away * fleet.devices_per_host / fleet.devices, 1.0)
    for kind in ("training", "data wait", "evaluation"):
        shares[FEWER_DEVICES] += shares[kind] * missing
        shares[kind] *= 1 - missing


def young_daly_seconds(stages: StageTimes, fleet: Fleet) -> float:
    """Return the theoretical optimum of the seconds of work between two checkpoints; infinite if nothing
    fails.

    Maximizes the closed form: (1 - x) exp(x + rate * stall) = 1 with x = rate * seconds, which is about
    sqrt(2 * stall / rate), Young's formula, for a short stall. It depends on neither the recovery nor the
    commit, but no checkpoint begins before the previous one is committed. With copies in memory only failures
    that destroy them count.
    """
    rate = fleet.failures_per_second
    if stages.copy_every:
        rate *= fleet.destroys_copies(stages)
    if not rate:
        return math.inf
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        # The logarithm of the condition, which falls with x.
        above = math.log1p(-middle) + middle + rate * stages.stall > 0 if middle < 1 else False
        low, high = (middle, high) if above else (low, middle)
    return max(low / rate, stages.commit)


def best_every(stages: StageTimes, fleet: Fleet) -> int:
    """Find the number of steps between two checkpoints with the highest goodput in the model.

    A multiple of `copy_every` if there are copies in memory.
    """
    unit = stages.copy_every or 1
    max_count = int((fleet.days * SECONDS_PER_DAY - stages.stall) / (unit * stages.step_with_waits))
    check_together(dataclasses.replace(stages, every=unit), fleet)
    known: dict[int, float] = {}

    def goodput(count: int) -> float:
        if count not in known:
            # If no interval advances the run, the shorter one is better.
            prediction = forecast(dataclasses.replace(stages, every=count * unit), fleet)
            known[count] = prediction.goodput if prediction.advances else -float(count)
        return known[count]

    tried = sorted(
        {min(round(1.3**power), max_count) for power in range(int(math.log(max_count, 1.3)) + 2)} | {1, max_count}
    )
    best = max(tried, key=goodput)
    place = tried.index(best)
    low, high = tried[max(place - 1, 0)], tried[min(place + 1, len(tried) - 1)]
    while high - low > 3:
        one, two = low + (high - low) // 3, high - (high - low) // 3
        low, high = (low, two) if goodput(one) >= goodput(two) else (one, high)
    return max(range(low, high + 1), key=goodput) * unit
