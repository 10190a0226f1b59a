"""Detection of hardware faults: plain functions from a profile's figures to findings.

Like is compared with like: each device with the other devices, each link with the other links of its kind,
each host with the other hosts. The reference is the upper quartile of the others (for latencies the lower):
with three hosts, one slow host makes four of six links slow, and their median would be slow too. Without a
comparison a figure is reported only if no working cluster has it.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence

from ..plan.search.profile import DeviceRates, DiskRates, HardwareProfile, LinkRates, ProcessFacts
from ..plan.search.targets import CHIPS
from ..system.terminal_text import format_elapsed, format_flop_rate, format_rate
from .versions import find_outliers

DEVICE_RATIO, CPU_RATIO = 1.25, 2.5
"""Factor by which the others must be faster for a device to be slow. Of three processes on two cores, healthy
ones were within 1.9."""

LINK_RATIO, CPU_LINK_RATIO = 2.0, 8.0
"""The same for a link's bandwidth: between accelerators, and between processes on CPUs. Healthy links between
three processes on two cores were within 4.2, since the sender may wait for a core."""

LATENCY_RATIO, LATENCY_SECONDS = 4.0, 2e-3
"""Factor and difference by which a link's latency must exceed that of the others to be high: a time slice of
a busy core. Healthy ones were within 1.9, at 0.1 ms."""

LEAST_BANDWIDTH, MOST_LATENCY = 12.5e6, 10e-3
"""100 Mbit/s, and 10 ms: no network that joins the hosts of one job is slower."""

PEAK_SHARE = 0.4
"""Share of its data sheet's rate in large multiplications below which a device is slow, even if all are."""

CLOCK_SECONDS = 0.1
"""Difference above which a clock is reported: clocks that NTP sets are within 10 ms."""

DISK_RATIO, LEAST_DISK = 4.0, 20e6
"""A disk is slow if the other hosts' are faster by this factor, or below 20 MB/s: a single hard disk writes
100."""

STOLEN_CORES, STOLEN_SHARE = 0.5, 1 / 32
"""Others may use half a core, or this share of the host's cores: its own services and monitoring."""


@dataclasses.dataclass(frozen=True)
class HardwareFinding:
    """A problem of the hardware or its software, with advice.

    Attributes:
        kind: link, device, cores, clock, disk or version.
        where: The host, process, device or link.
        said: The measured and the expected value.
        advice: What to do.
    """

    kind: str
    where: str
    said: str
    advice: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.said}; {self.advice}"


def find_problems(profile: HardwareProfile) -> list[HardwareFinding]:
    """Return all problems, the most important first."""
    return [
        *find_slow_links(profile),
        *find_slow_devices(profile),
        *find_busy_hosts(profile),
        *find_slow_disks(profile),
        *find_clock_offsets(profile),
        *find_version_mismatches(profile),
    ]


def process_name(profile: HardwareProfile, index: int) -> str:
    """Return a process's name in messages: by its host if that runs no other process, otherwise by its
    number."""
    hosts = {each.index: each.host for each in profile.processes}
    if len(hosts) == 1:
        return f"host {hosts[index]}"
    if len(set(hosts.values())) == len(hosts):
        return f"host {hosts[index]} (process {index})"
    return f"process {index} on host {hosts[index]}"


def typical(others: Iterable[float], *, best: Callable[..., float] = max) -> float | None:
    """Return the reference value of others: the quartile on the better side; None if there are none.

    >>> typical([1.0, 8.0, 9.0, 10.0]), typical([3.0], best=min), typical([])
    (9.0, 3.0, None)
    """
    ordered = sorted(others, reverse=best is max)
    return ordered[len(ordered) // 4] if ordered else None


# --- links


def find_slow_links(profile: HardwareProfile) -> list[HardwareFinding]:
    """Find links that are slow compared with others of their kind; if all links of a host are slow, the host
    is reported instead."""
    findings = []
    for between_hosts in (True, False):
        links = [
            link
            for link in profile.links
            if (profile.places[link.source].host != profile.places[link.target].host) is between_hosts
        ]
        slow = [link for link in links if _problem_of(profile, link, links)]
        findings += _named(profile, links, slow)
    return findings


def _problem_of(profile: HardwareProfile, link: LinkRates, links: Sequence[LinkRates]) -> str:
    others = [each for each in links if each is not link]
    bandwidth = typical(each.bandwidth for each in others)
    latency = typical((each.latency_seconds for each in others), best=min)
    ratio = CPU_LINK_RATIO if profile.platform == "cpu" else LINK_RATIO
    problems = []
    if bandwidth is not None and link.bandwidth * ratio < bandwidth:
        problems.append(
            f"{format_rate(link.bandwidth)}, where other links carry {format_rate(bandwidth)}, "
            f"{bandwidth / link.bandwidth:.0f} times more"
        )
    elif link.bandwidth < LEAST_BANDWIDTH:
        problems.append(
            f"{format_rate(link.bandwidth)}, below the {format_rate(LEAST_BANDWIDTH)} of any usable network"
        )
    if latency is not None and link.latency_seconds > max(LATENCY_RATIO * latency, latency + LATENCY_SECONDS):
        problems.append(
            f"latency {format_elapsed(link.latency_seconds)}, where other links have {format_elapsed(latency)}"
        )
    elif link.latency_seconds > MOST_LATENCY:
        problems.append(f"latency {format_elapsed(link.latency_seconds)}, above {format_elapsed(MOST_LATENCY)}")
    return ", and ".join(problems)


def _named(profile: HardwareProfile, links: Sequence[LinkRates], slow: Sequence[LinkRates]) -> list[HardwareFinding]:
    findings, rest = [], list(slow)
    processes = {each.process for each in profile.places}
    for process in sorted(processes):
        out = [link for link in links if profile.places[link.source].process == process]
        back = [link for link in links if profile.places[link.target].process == process]
        for all_of, does in (([*out, *back], "sends and receives at"), (out, "sends at"), (back, "receives at")):
            neighbors = {profile.places[end].process for link in all_of for end in (link.source, link.target)} - {
                process
            }
            if len(neighbors) >= 2 and all(link in rest for link in all_of):
                worst = min(all_of, key=lambda link: link.bandwidth)
                said = f"{does} {_problem_of(profile, worst, links)}"
                findings.append(
                    HardwareFinding("link", process_name(profile, process), f"{said} ({_axes(all_of)})", _NETWORK)
                )
                rest = [link for link in rest if link not in all_of]
                break
    while rest:
        link = rest.pop(0)
        reverse = next((each for each in rest if (each.source, each.target) == (link.target, link.source)), None)
        if reverse is not None:
            rest.remove(reverse)
        both = [link, *([reverse] if reverse else [])]
        worst = min(both, key=lambda each: each.bandwidth)
        where = f"{_end(profile, link.source)} {'and' if reverse else 'to'} {_end(profile, link.target)}"
        said = f"{_problem_of(profile, worst, links)} ({_axes(both)})"
        findings.append(HardwareFinding("link", where, said, _NETWORK))
    return findings


_NETWORK = (
    "look at the network card, cable and switch port between them (ethtool, ibstat, nvidia-smi topo -m), and at their "
    "other users, or remove a host"
)


def _axes(links: Iterable[LinkRates]) -> str:
    names = dict.fromkeys(axis for link in links for axis in link.axes)
    return f"mesh axis {', '.join(names)}" if len(names) == 1 else f"mesh axes {', '.join(names)}"


def _end(profile: HardwareProfile, place: int) -> str:
    process = profile.places[place].process
    several = sum(each.process == process for each in profile.places) > 1 and profile.platform != "cpu"
    return f"{process_name(profile, process)}{f', device {place} of the mesh' if several else ''}"


# --- devices and cores


def find_slow_devices(profile: HardwareProfile) -> list[HardwareFinding]:
    """Find devices with multiplications or memory that are slow compared with others', or with a data
    sheet."""
    findings = []
    ratio = CPU_RATIO if profile.platform == "cpu" else DEVICE_RATIO
    peak = next((chip.peak_flops for kind, chip in CHIPS.items() if kind in profile.device_kind.lower()), None)
    for device in profile.devices:
        others = [each for each in profile.devices if each is not device]
        flops = typical(each.matrix_flops for each in others)
        memory = typical(each.memory_bandwidth for each in others)
        problems = []
        if flops is not None and device.matrix_flops * ratio < flops:
            problems.append(
                f"multiplies matrices at {format_flop_rate(device.matrix_flops)}, where others reach {format_flop_rate(flops)}"
            )
        elif peak is not None and device.matrix_flops < PEAK_SHARE * peak:
            share = f"{device.matrix_flops / peak:.0%} of the {format_flop_rate(peak)} of its data sheet"
            problems.append(f"multiplies matrices at {format_flop_rate(device.matrix_flops)}, {share}")
        if memory is not None and device.memory_bandwidth * ratio < memory:
            problems.append(
                f"copies memory at {format_rate(device.memory_bandwidth)}, where others reach {format_rate(memory)}"
            )
        if problems:
            findings.append(
                HardwareFinding("device", _device(profile, device), ", and ".join(problems), _device_advice(profile))
            )
    return findings


def _device(profile: HardwareProfile, device: DeviceRates) -> str:
    name = process_name(profile, device.process)
    return name if profile.platform == "cpu" else f"{device.name} of {name}"


def _device_advice(profile: HardwareProfile) -> str:
    if profile.platform == "cpu":
        return "see what else runs there (top), how many cores the process may use (taskset -p, cgroups), and the clock rate"
    return "look at its temperature, power limit, clocks and errors (nvidia-smi -q, dmesg), or remove the host"


def find_busy_hosts(profile: HardwareProfile) -> list[HardwareFinding]:
    """Find hosts with cores that others use."""
    findings, reported_hosts = [], set()
    for each in profile.processes:
        limit = max(STOLEN_CORES, STOLEN_SHARE * each.cores)
        if each.host not in reported_hosts and each.stolen_cores > limit:
            problem = f"other programs use {each.stolen_cores:.1f} of its {each.cores} cores: {each.stolen_by}"
            findings.append(
                HardwareFinding("cores", f"host {each.host}", problem, "end them, or give the run its own cores")
            )
        reported_hosts.add(each.host)
    return findings


# --- disks, clocks, versions


def find_slow_disks(profile: HardwareProfile) -> list[HardwareFinding]:
    """Find locations to which one host, or all of them, write or read slowly."""
    findings = []
    for disk in profile.disks:
        others = [each for each in profile.disks if each.place == disk.place and each is not disk]
        problems = []
        for does, bandwidth, theirs in (
            ("writes", disk.write_bandwidth, typical(each.write_bandwidth for each in others)),
            ("reads", disk.read_bandwidth, typical(each.read_bandwidth for each in others)),
        ):
            if theirs is not None and bandwidth * DISK_RATIO < theirs:
                problems.append(f"{does} {format_rate(bandwidth)}, where other hosts reach {format_rate(theirs)}")
            elif bandwidth < LEAST_DISK:
                problems.append(
                    f"{does} {format_rate(bandwidth)}, below {format_rate(LEAST_DISK)}: {_time_of(disk, bandwidth)}"
                )
        if problems:
            advice = "see what else uses it (iostat -x), its quota and its mount, or keep checkpoints elsewhere"
            findings.append(
                HardwareFinding("disk", f"{disk.place} on host {disk.host}", ", and ".join(problems), advice)
            )
    return findings


def _time_of(disk: DiskRates, bandwidth: float) -> str:
    return f"10 GB take {format_elapsed(10e9 / bandwidth)}"


def find_clock_offsets(profile: HardwareProfile) -> list[HardwareFinding]:
    """Find processes with a clock that differs from the others'."""
    offsets = {each.index: each.clock_offset_seconds for each in profile.processes}
    if len(offsets) < 2:
        return []
    middle = statistics.median(offsets.values())
    findings, reported = [], set()
    advice = (
        "have NTP or chrony set it (timedatectl, chronyc tracking): logs and signed requests to stores depend on it"
    )
    if len(offsets) == 2:
        first, second = profile.processes[:2]
        apart = second.clock_offset_seconds - first.clock_offset_seconds
        if abs(apart) > CLOCK_SECONDS + second.clock_error_seconds:
            where = f"{process_name(profile, first.index)} and {process_name(profile, second.index)}"
            problem = (
                f"the second one's clock is {_ahead(apart, second)} the first one's, and with two the correct one is "
                f"unknown"
            )
            return [HardwareFinding("clock", where, problem, advice)]
        return []
    for each in profile.processes:
        off = each.clock_offset_seconds - middle
        if abs(off) > CLOCK_SECONDS + each.clock_error_seconds:
            # All processes of a host share its clock.
            key = (each.host, round(off / CLOCK_SECONDS))
            if key not in reported:
                problem = f"its clock is {_ahead(off, each)} the others'"
                findings.append(HardwareFinding("clock", process_name(profile, each.index), problem, advice))
            reported.add(key)
    return findings


def _ahead(offset: float, facts: ProcessFacts) -> str:
    way = "ahead of" if offset > 0 else "behind"
    return f"{format_elapsed(abs(offset))} (± {format_elapsed(max(facts.clock_error_seconds, 1e-5))}) {way}"


def find_version_mismatches(profile: HardwareProfile) -> list[HardwareFinding]:
    """Find versions and settings that differ between processes."""
    findings = []
    names = dict.fromkeys(name for each in profile.processes for name in each.versions)
    for name in names:
        values = {each.index: each.versions.get(name, "missing") for each in profile.processes}
        if len(set(values.values())) == 1:
            continue
        majority, odd = find_outliers(values)
        advice = f"make {name} the same everywhere: results and speed may differ, or programs not fit each other"
        if majority is None:
            problem = "; ".join(f"{value} on {_several(profile, who)}" for value, who in odd.items())
            findings.append(HardwareFinding("version", name, problem, advice))
        for value, who in odd.items() if majority is not None else ():
            findings.append(
                HardwareFinding("version", _several(profile, who), f"{name} is {value}, elsewhere {majority}", advice)
            )
    return findings


def _several(profile: HardwareProfile, processes: Sequence[int]) -> str:
    names = ", ".join(process_name(profile, index) for index in processes[:4])
    return names if len(processes) <= 4 else f"{names} and {len(processes) - 4} more"
