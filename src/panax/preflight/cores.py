"""Use of this host's cores by others: other programs, and other machines on the same hardware."""

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path

from .versions import host_name

NAMED_CORES = 0.1
"""Share of a core below which a program is not named."""

_STAT = Path("/proc/stat")

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclasses.dataclass(frozen=True)
class CoreTimes:
    """The system's CPU counters at a moment, in seconds.

    Attributes:
        busy: Time of all cores together, used by all programs; None if the system does not report it.
        stolen: Time that the hypervisor gave to other machines.
        own: CPU time of this process.
        programs: Process number to (name, seconds) of each visible process.
    """

    at: float
    cores: int
    busy: float | None
    stolen: float
    own: float
    programs: dict[int, tuple[str, float]]


@dataclasses.dataclass(frozen=True)
class CoreUsage:
    """Use of cores between two moments, as one process saw it.

    Attributes:
        machine: The kernel that counted; containers with different names may share one.
        seconds: Seconds between the moments.
        busy: Core-seconds of the host used by all programs; None if the system does not report it.
        own: Core-seconds used by this process.
        programs: The busiest programs as (process number, name, seconds), at most ten.
    """

    pid: int
    machine: str
    seconds: float
    cores: int
    busy: float | None
    stolen: float
    own: float
    programs: list[tuple[int, str, float]]


def read_core_times() -> CoreTimes:
    """Read the system's counters now."""
    import psutil

    busy, stolen = _busy_and_stolen()
    programs = {}
    for each in psutil.process_iter(["pid", "name", "cpu_times"]):
        times = each.info["cpu_times"]
        if times is not None:
            programs[each.info["pid"]] = (each.info["name"] or "?", times.user + times.system)
    return CoreTimes(time.monotonic(), os.cpu_count() or 1, busy, stolen, time.process_time(), programs)


def measure_usage(before: CoreTimes, after: CoreTimes) -> CoreUsage:
    """Compute the processor time used between two readings."""
    used = []
    for pid, (name, seconds) in after.programs.items():
        name_before, seconds_before = before.programs.get(pid, (name, 0.0))
        if name_before == name and pid != os.getpid():
            used.append((pid, name, seconds - seconds_before))
    used.sort(key=lambda each: -each[2])
    busy = None if after.busy is None or before.busy is None else after.busy - before.busy
    return CoreUsage(
        os.getpid(),
        _machine(),
        after.at - before.at,
        after.cores,
        busy,
        after.stolen - before.stolen,
        after.own - before.own,
        [each for each in used[:10] if each[2] > 0],
    )


def busy_cores(usages: Sequence[CoreUsage]) -> tuple[float, str]:
    """Return the number of a machine's cores that others used, and, as far as visible, the programs that used
    most, each with its cores.

    Args:
        usages: Usage as seen by each of the job's processes on that machine.

    >>> mine = CoreUsage(7, "a", 2.0, 4, 5.0, 0.0, 3.0, [(9, "backup", 1.8)])
    >>> busy_cores([mine])
    (1.0, 'backup (process 9): 0.9')
    """
    known = [each for each in usages if each.busy is not None and each.seconds > 0]
    if not known:
        return 0.0, ""
    # All measure at about the same time; the one that measured longest covers the others.
    widest = max(known, key=lambda each: each.seconds)
    job_seconds = sum(each.own for each in usages)
    others = max(0.0, (widest.busy or 0.0) - job_seconds)
    jobs = {each.pid for each in usages}
    names = [
        f"{name} (process {pid}): {seconds / widest.seconds:.1f}"
        for pid, name, seconds in widest.programs
        if pid not in jobs and seconds > NAMED_CORES * widest.seconds
    ]
    cores = (others + widest.stolen) / widest.seconds
    if widest.stolen > others:
        by = "other machines on the same hardware (steal time)"
    elif names:
        by = ", ".join(names[:3])
    else:
        by = "programs that this process does not see, or many small ones"
    return round(cores, 3), by


def _machine() -> str:
    """Return a name of the running kernel, the same in all of its containers."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text(encoding="ascii").strip() if file.exists() else host_name()


def _busy_and_stolen() -> tuple[float | None, float]:
    """Return (seconds that all cores have worked, or None if the system does not report them; seconds that the
    hypervisor has taken)."""
    if not _STAT.exists():
        return None, 0.0
    numbers = [int(each) for each in _STAT.read_text(encoding="ascii").partition("\n")[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, steal, *_ = [*numbers, *[0] * 8]
    return (user + nice + system + irq + softirq) / _TICKS, steal / _TICKS
