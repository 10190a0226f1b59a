"""Detection of slow hosts from each host's measurements at the same steps, in plain Python.

Each host is compared with the median of the others, so that uniformly slow hosts name none. With two hosts
there is no majority: each is compared with its own earlier speed, in a check before the run or at the run's
first probes.
"""

import dataclasses
import statistics
from collections.abc import Mapping

SLOW_SECONDS = 20.0
"""Time for which a host must be slow until it is named: another program that comes and goes is not a
fault."""

MAX_PROBES = 100
"""Maximum number of stored probes."""

BASELINE_PROBES = 3
"""Number of first probes: with two hosts and no check before the run, their median is a host's normal
speed."""

MAX_DEVICE_WAIT = 0.25
"""Share of a step: a host that waits longer for its devices does not delay the others by its own work."""


@dataclasses.dataclass(frozen=True)
class HostProbe:
    """One host's measurements at one probe; the slowest of its processes.

    Attributes:
        matrix: Seconds of a matrix multiplication on its idle devices.
        host: Seconds of a step for host work: waiting for data, hooks, the loop's work.
        part: Name of the largest part of the host work.
        device_wait: Seconds of a step for which the host waited for its devices, which may wait for others.
        step: Seconds of a step.
        could: Seconds of the multiplication by a check before the run, up to a factor that all hosts share;
            None without a check.
    """

    matrix: float
    host: float = 0.0
    part: str = ""
    device_wait: float = 0.0
    step: float = 0.0
    could: float | None = None


@dataclasses.dataclass(frozen=True)
class Slowness:
    """Slowness of a host compared to the others.

    Attributes:
        ratio: Ratio of its time to the others'.
        description: The measurements as text for users.
    """

    ratio: float
    description: str


def measure_slowness(probes: Mapping[int, HostProbe], early: Mapping[int, float]) -> dict[int, Slowness]:
    """Compute the slowness of each host compared to the others; empty for one host.

    Args:
        early: With two hosts, the initial time of the multiplication on each.

    >>> probe = {0: HostProbe(0.010), 1: HostProbe(0.010), 2: HostProbe(0.030)}
    >>> {host: round(slow.ratio, 1) for host, slow in measure_slowness(probe, {}).items()}
    {0: 1.0, 1: 1.0, 2: 3.0}
    """
    if len(probes) < 2:
        return {}
    return {
        host: max(_matrix(host, probes, early), _host_work_slowness(host, probes), key=lambda slow: slow.ratio)
        for host in probes
    }


def _matrix(host: int, probes: Mapping[int, HostProbe], early: Mapping[int, float]) -> Slowness:
    mine = probes[host].matrix
    others = [other for other in probes if other != host]
    if len(others) > 1:
        usual = statistics.median(probes[other].matrix for other in others)
        ratio = mine / usual
        return Slowness(ratio, f"its matrix multiplications take {_ms(mine)}, those of the others {_ms(usual)}")
    [other] = others
    by_check = probes[host].could is not None and probes[other].could is not None
    could = {each: probes[each].could if by_check else early.get(each) for each in probes}
    baseline, theirs = could[host], could[other]
    if not baseline or not theirs:
        return Slowness(1.0, "")
    ratio = min(mine / baseline / (probes[other].matrix / theirs), mine / baseline if not by_check else float("inf"))
    before = "a check before the run" if by_check else "its first probes"
    return Slowness(
        ratio,
        f"its matrix multiplications take {_ms(mine)}, those of the other host {_ms(probes[other].matrix)}: compared "
        f"with {before}, it has become {ratio:.1f} times as slow as the other one",
    )


def _host_work_slowness(host: int, probes: Mapping[int, HostProbe]) -> Slowness:
    """Compare a step's time with the time that it would take if this host's own work took as long as on other
    hosts."""
    probe = probes[host]
    usual = statistics.median(probes[other].host for other in probes if other != host)
    excess = probe.host - usual
    if excess <= 0 or probe.device_wait > MAX_DEVICE_WAIT * probe.step or probe.step <= excess:
        return Slowness(1.0, "")
    ratio = probe.step / (probe.step - excess)
    description = (
        f"it spends {_ms(probe.host)} of each step of {_ms(probe.step)} on {probe.part}, where others spend "
        f"{_ms(usual)}"
    )
    return Slowness(ratio, description)


@dataclasses.dataclass(frozen=True)
class HostChange:
    """A host that has become slow, or has recovered."""

    host: int
    slow: bool
    slowness: Slowness


class SlowHosts:
    """Tracker of the hosts of a job from probe to probe.

    Attributes:
        slow: Host to its slowness, for the hosts currently reported as slow.
    """

    def __init__(self, factor: float = 1.5, row: int = 3):
        """Track hosts.

        Args:
            factor: A host is slow if it takes this many times as long as the others.
            row: Number of consecutive probes until a host is reported, and until it counts as recovered.
        """
        self._factor, self._row = factor, row
        self._early: dict[int, list[float]] = {}
        self._last: list[Mapping[int, HostProbe]] = []
        self._turning: dict[int, list[float]] = {}
        self.slow: dict[int, Slowness] = {}

    def begin(self) -> None:
        """Reset the counts of consecutive probes: the job has started again, perhaps on other hosts."""
        self._turning, self._last, self.slow = {}, [], {}

    def add(self, probes: Mapping[int, HostProbe], now: float) -> list[HostChange]:
        """Process a probe of all hosts; return those that have become slow, the slowest first, or have
        recovered.

        Args:
            now: Time of a monotonic clock, in seconds.
        """
        for host, measured in probes.items():
            early = self._early.setdefault(host, [])
            if len(early) < BASELINE_PROBES:
                early.append(measured.matrix)
        early = {host: statistics.median(times) for host, times in self._early.items() if len(times) == BASELINE_PROBES}
        self._last = [*self._last, probes][-MAX_PROBES:]
        changes = []
        for host, slowness in measure_slowness(probes, early).items():
            is_slow = slowness.ratio >= self._factor
            if is_slow is (host in self.slow):
                self._turning.pop(host, None)
                if is_slow:
                    self.slow[host] = slowness
                continue
            row = self._turning.setdefault(host, [])
            row.append(now)
            if len(row) < self._row or now - row[0] < SLOW_SECONDS:
                continue
            if is_slow and measure_slowness(self._fastest(len(row), probes), early)[host].ratio < self._factor:
                continue
            del self._turning[host]
            if is_slow:
                self.slow[host] = slowness
            else:
                del self.slow[host]
            changes.append(HostChange(host, is_slow, slowness))
        return sorted(changes, key=lambda change: -change.slowness.ratio)

    def _fastest(self, count: int, probes: Mapping[int, HostProbe]) -> dict[int, HostProbe]:
        """Return the newest probe with the fastest multiplication of the last `count` probes, to reduce noise."""
        last = [each for each in self._last[-count:] if each.keys() == probes.keys()]
        return {
            host: dataclasses.replace(newest, matrix=min(each[host].matrix for each in last))
            for host, newest in probes.items()
        }


def _ms(seconds: float) -> str:
    """Format seconds in a suitable unit.

    >>> _ms(0.0042), _ms(2.5)
    ('4.2 ms', '2.5 s')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
