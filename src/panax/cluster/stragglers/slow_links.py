"""Detection of slow links from the collectives that a job's processes timed at the same steps, in plain Python.

Each mesh axis is compared with the result of a check of these hosts before the run, or with the run's first
probes. All processes of a group see a slow collective; a single host is identified by messages to neighbors,
or as the one shared by slow groups of several axes.
"""

import dataclasses
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence

SLOW_FACTORS = {"cpu": 4.0}
SLOW_FACTOR = 2.0
"""A collective is slow if it takes this many times as long as usual; more between processes on CPUs, which
may wait for a core."""

SLOW_SECONDS = {"cpu": 15e-3}
_SECONDS = 2e-4
"""And this much longer, in seconds: a few time slices of a busy core. Healthy collectives of four processes
on two cores that were also used by others were within 8 ms."""

CONSECUTIVE_PROBES = 2
"""Number of consecutive probes until a link is named, and until it counts as recovered."""

BASELINE_PROBES = 3
"""Number of first probes: without a check before the run, their median is the usual time of a collective."""

SAME_HOST_FACTOR = 5.0
"""Slow links of one host are within this factor of each other."""

FLAPS, OF = 3, 10
"""A link that is slow in `FLAPS` of `OF` probes flaps, even if never twice in a row."""

AxisName = str
Group = tuple[int, ...]
"""Processes that take part in one collective."""


@dataclasses.dataclass(frozen=True)
class CollectiveTimes:
    """One process's measurements at one probe.

    Attributes:
        axes: Mesh axis to the seconds of a collective over it.
        groups: Mesh axis to the processes of its group.
        links: Process to the seconds of a message to it; empty if no link was measured.
    """

    axes: Mapping[AxisName, float]
    groups: Mapping[AxisName, Group]
    links: Mapping[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class SlowGroup:
    """A group of processes with slow collectives over a mesh axis, now or before.

    Attributes:
        seconds: Current time of a collective.
        baseline: Its usual time.
        suspects: The processes at fault, as far as known; two are the ends of one link.
        times: Number of times that the group has become slow so far.
    """

    axis: str
    group: Group
    seconds: float
    baseline: float
    suspects: tuple[int, ...] = ()
    times: int = 1


@dataclasses.dataclass(frozen=True)
class LinkChange:
    """A group that has become slow, is back to normal, or flaps."""

    what: str
    link: SlowGroup


SLOW, WELL, FLAPPING = "slow", "well", "flapping"


class SlowLinks:
    """Tracker of the groups of a job from probe to probe.

    Attributes:
        slow: (mesh axis, group) to its state, for the groups currently reported as slow.
    """

    def __init__(self, platform: str = "cpu", expected: Mapping[str, float] | None = None):
        """Track groups.

        Args:
            expected: Mesh axis to the seconds of its collective, from a check before the run.
        """
        self._factor, self._min_excess = SLOW_FACTORS.get(platform, SLOW_FACTOR), SLOW_SECONDS.get(platform, _SECONDS)
        self._expected = dict(expected or {})
        self._early: dict[tuple[str, Group], list[float]] = {}
        self._recent: dict[tuple[str, Group], deque[bool]] = {}
        self._times: dict[tuple[str, Group], int] = {}
        self._flapping: set[tuple[str, Group]] = set()
        self.slow: dict[tuple[str, Group], SlowGroup] = {}

    def begin(self) -> None:
        """Reset the counts of consecutive probes: the job has started again."""
        self._recent, self._flapping, self.slow = {}, set(), {}

    def add(self, times: Mapping[int, CollectiveTimes]) -> list[LinkChange]:
        """Process one probe of all processes; return the groups that have become slow, have recovered, or
        flap."""
        timed = slowest_by_group(times)
        changes: list[LinkChange] = []
        slow_now = {key for key, seconds in timed.items() if self._is_slow(key, seconds)}
        for key, seconds in timed.items():
            early, recent = self._early.setdefault(key, []), self._recent.setdefault(key, deque(maxlen=OF))
            usual = self._usual(key) or seconds
            if len(early) < BASELINE_PROBES:
                early.append(seconds)
            recent.append(key in slow_now)
            row, last = _trailing_count(recent), recent[-1]
            suspects = find_suspects(key[1], times, [group for _, group in slow_now], self._factor, self._min_excess)
            if key in self.slow:
                before = self.slow[key]
                narrowed_suspects = (
                    suspects if last and len(suspects) < len(before.suspects or key[1]) else before.suspects
                )
                self.slow[key] = SlowGroup(*key, seconds, before.baseline, narrowed_suspects, before.times)
                if not last and row >= CONSECUTIVE_PROBES:
                    changes.append(LinkChange(WELL, self.slow.pop(key)))
            elif last and row >= CONSECUTIVE_PROBES:
                self._times[key] = self._times.get(key, 0) + 1
                self.slow[key] = SlowGroup(*key, seconds, usual, suspects, self._times[key])
                changes.append(LinkChange(SLOW, self.slow[key]))
            if (
                key not in self.slow
                and last
                and key not in self._flapping
                and sum(recent) >= FLAPS
                and _slow_turns(recent) >= FLAPS
            ):
                self._flapping.add(key)
                changes.append(LinkChange(FLAPPING, SlowGroup(*key, seconds, usual, suspects, sum(recent))))
            if not any(recent):
                self._flapping.discard(key)
        return changes

    def _usual(self, key: tuple[str, Group]) -> float | None:
        if key[0] in self._expected:
            return self._expected[key[0]]
        early = self._early.get(key, [])
        return statistics.median(early) if len(early) == BASELINE_PROBES else None

    def _is_slow(self, key: tuple[str, Group], seconds: float) -> bool:
        usual = self._usual(key)
        return usual is not None and seconds > max(self._factor * usual, usual + self._min_excess)


def slowest_by_group(times: Mapping[int, CollectiveTimes]) -> dict[tuple[str, Group], float]:
    """Return the time of a collective for each group of each axis, as measured by its slowest process.

    >>> first, second = (CollectiveTimes({"fsdp": seconds}, {"fsdp": (0, 1)}) for seconds in (0.1, 0.2))
    >>> slowest_by_group({0: first, 1: second})
    {('fsdp', (0, 1)): 0.2}
    """
    timed: dict[tuple[str, Group], float] = {}
    for process, one in times.items():
        for axis, seconds in one.axes.items():
            key = (axis, tuple(one.groups.get(axis, (process,))))
            timed[key] = max(timed.get(key, 0.0), seconds)
    return timed


def find_suspects(
    group: Group,
    times: Mapping[int, CollectiveTimes],
    slow_groups: Sequence[Group] = (),
    factor: float = SLOW_FACTOR,
    min_excess: float = 0.0,
) -> tuple[int, ...]:
    """Find the process of a slow group that is at fault, or the two ends of a link; empty if unclear.

    Args:
        slow_groups: All slow groups, of any axis.
        factor: A message is slow if it takes this many times as long as others,
        min_excess: and this many seconds longer.

    >>> ring = {0: {1: 0.01}, 1: {0: 0.01, 2: 0.01}, 2: {1: 0.3, 3: 0.3}, 3: {2: 0.01}}
    >>> find_suspects((0, 1, 2, 3), {process: CollectiveTimes({}, {}, links) for process, links in ring.items()})
    (2,)
    """
    links = {(source, target): seconds for source, one in times.items() for target, seconds in one.links.items()}
    slow = _slow(links, factor, min_excess)
    inside = {link for link in slow if link[0] in group and link[1] in group}
    if inside:
        # Messages of several axes are evaluated together.
        for side in (0, 1):
            for process in sorted({link[side] for link in inside}):
                process_links = [link for link in links if link[side] == process]
                if len({link[1 - side] for link in process_links}) > 1 and all(link in slow for link in process_links):
                    return (process,)
        return tuple(sorted(min(inside, key=lambda link: -links[link])))
    shared = [process for process in group if sum(process in other for other in {*slow_groups}) > 1]
    return (shared[0],) if len(shared) == 1 else ()


def _slow(links: Mapping[tuple[int, int], float], factor: float, min_excess: float) -> Collection[tuple[int, int]]:
    if len(links) < 2:
        return []
    # As in `panax check`: with three hosts, one slow host makes four of six links slow.
    usual = sorted(links.values())[len(links) // 4]
    # Next to a link that takes a hundred times as long, one that takes five times as long waited for a core.
    limit = max(factor * usual, usual + min_excess, max(links.values()) / SAME_HOST_FACTOR)
    return {link for link, seconds in links.items() if seconds > limit}


def _trailing_count(recent: Sequence[bool]) -> int:
    """Count the trailing entries that are equal."""
    count = 0
    for each in reversed(recent):
        if each is not recent[-1]:
            break
        count += 1
    return count


def _slow_turns(recent: Sequence[bool]) -> int:
    """Count the changes from fast to slow."""
    found = list(recent)
    return sum(now and not before for before, now in zip([False, *found], found))
