"""Which host slows a job down, from what each measured of itself at the same steps: plain functions and counts.

Each host is compared with the median of the others, so that hosts that are all slow name nobody. With two hosts there is no
majority: each is compared with what it did itself, in a check before the run or at the run's first probes.
"""

import dataclasses
import statistics
from collections.abc import Mapping

SLOW_SECONDS = 20.0
"""For so long a host is slow until it is named: another program that comes and goes is no fault."""

MAX_PROBES = 100
"""Probes that are kept."""

BASELINE_PROBES = 3
"""With two hosts and no check before the run, the median of so many first probes is what a host can do."""

MAX_DEVICE_WAIT = 0.25
"""A host that waits for its devices for more than this share of a step does not hold the others up by its own work."""


@dataclasses.dataclass(frozen=True)
class HostProbe:
    """What one host told at one probe; of several processes the slowest.

    Attributes:
        matrix: Seconds of a matrix multiplication on its own devices, while they were idle.
        host: Seconds of a step that it spent on its own: waiting for data, hooks, the loop's work.
        part: The largest part of that, in words.
        device_wait: Seconds of a step that it waited for its devices, which may wait for others.
        step: Seconds of a step.
        could: Seconds of the multiplication by a check before the run, up to a factor that all hosts share; None without one.
    """

    matrix: float
    host: float = 0.0
    part: str = ""
    device_wait: float = 0.0
    step: float = 0.0
    could: float | None = None


@dataclasses.dataclass(frozen=True)
class Slowness:
    """How slow a host is beside the others.

    Attributes:
        ratio: Of what it takes to what the others take.
        said: The figures, for a person.
    """

    ratio: float
    description: str


def measure_slowness(found: Mapping[int, HostProbe], early: Mapping[int, float]) -> dict[int, Slowness]:
    """How slow each host is beside the others; empty for one host.

    Args:
        early: With two hosts, what the multiplication took each of them at first.

    >>> probe = {0: HostProbe(0.010), 1: HostProbe(0.010), 2: HostProbe(0.030)}
    >>> {host: round(slow.ratio, 1) for host, slow in measure_slowness(probe, {}).items()}
    {0: 1.0, 1: 1.0, 2: 3.0}
    """
    if len(found) < 2:
        return {}
    return {host: max(_matrix(host, found, early), _own(host, found), key=lambda slow: slow.ratio) for host in found}


def _matrix(host: int, found: Mapping[int, HostProbe], early: Mapping[int, float]) -> Slowness:
    mine = found[host].matrix
    others = [other for other in found if other != host]
    if len(others) > 1:
        usual = statistics.median(found[other].matrix for other in others)
        ratio = mine / usual
        return Slowness(ratio, f"its matrix multiplications take {_ms(mine)}, those of the others {_ms(usual)}")
    [other] = others
    by_check = found[host].could is not None and found[other].could is not None
    could = {each: found[each].could if by_check else early.get(each) for each in found}
    own, theirs = could[host], could[other]
    if not own or not theirs:
        return Slowness(1.0, "")
    ratio = min(mine / own / (found[other].matrix / theirs), mine / own if not by_check else float("inf"))
    before = "a check before the run" if by_check else "its first probes"
    return Slowness(
        ratio,
        f"its matrix multiplications take {_ms(mine)}, those of the other host {_ms(found[other].matrix)}: beside {before} it "
        f"has become {ratio:.1f} times as slow as the other one",
    )


def _own(host: int, found: Mapping[int, HostProbe]) -> Slowness:
    """How many times as long a step takes as it would if this host's own work took what the others' takes."""
    mine = found[host]
    usual = statistics.median(found[other].host for other in found if other != host)
    excess = mine.host - usual
    if excess <= 0 or mine.device_wait > MAX_DEVICE_WAIT * mine.step or mine.step <= excess:
        return Slowness(1.0, "")
    ratio = mine.step / (mine.step - excess)
    said = (
        f"it spends {_ms(mine.host)} of each step of {_ms(mine.step)} on {mine.part}, where others spend {_ms(usual)}"
    )
    return Slowness(ratio, said)


@dataclasses.dataclass(frozen=True)
class HostChange:
    """A host that has become slow, or is well again."""

    host: int
    slow: bool
    slowness: Slowness


class SlowHosts:
    """Follows the hosts of a job from probe to probe.

    Attributes:
        slow: Host to how slow it is, of those that are named now.
    """

    def __init__(self, factor: float = 1.5, row: int = 3):
        """
        Args:
            factor: A host is slow if it takes so many times what the others take.
            row: In so many probes, one after the other, until it is named, and until it counts as well again.
        """
        self._factor, self._row = factor, row
        self._early: dict[int, list[float]] = {}
        self._last: list[Mapping[int, HostProbe]] = []
        self._turning: dict[int, list[float]] = {}
        self.slow: dict[int, Slowness] = {}

    def begin(self) -> None:
        """The job has started again, perhaps on other hosts: what was counted in a row is counted from the beginning."""
        self._turning, self._last, self.slow = {}, [], {}

    def add(self, found: Mapping[int, HostProbe], now: float) -> list[HostChange]:
        """Take in a probe of all hosts; who has become slow with it, the slowest first, or is well again.

        Args:
            now: By a clock that never goes back, in seconds.
        """
        for host, measured in found.items():
            early = self._early.setdefault(host, [])
            if len(early) < BASELINE_PROBES:
                early.append(measured.matrix)
        early = {host: statistics.median(times) for host, times in self._early.items() if len(times) == BASELINE_PROBES}
        self._last = [*self._last, found][-MAX_PROBES:]
        changes = []
        for host, slowness in measure_slowness(found, early).items():
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
            if is_slow and measure_slowness(self._fastest(len(row), found), early)[host].ratio < self._factor:
                continue
            del self._turning[host]
            if is_slow:
                self.slow[host] = slowness
            else:
                del self.slow[host]
            changes.append(HostChange(host, is_slow, slowness))
        return sorted(changes, key=lambda change: -change.slowness.ratio)

    def _fastest(self, count: int, found: Mapping[int, HostProbe]) -> dict[int, HostProbe]:
        """The newest probe, with the fastest multiplication of so many last ones: noise is not alike in all of them."""
        last = [each for each in self._last[-count:] if each.keys() == found.keys()]
        return {
            host: dataclasses.replace(one, matrix=min(each[host].matrix for each in last))
            for host, one in found.items()
        }


def _ms(seconds: float) -> str:
    """Seconds in the unit that fits.

    >>> _ms(0.0042), _ms(2.5)
    ('4.2 ms', '2.5 s')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
