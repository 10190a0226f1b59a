"""The host's memory: the bytes that this process may use, and those that are free now, within the limits of
its container and job."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")

_FILES = {
    # Version 2, then version 1: the limit, the usage, and the part of the usage that the kernel reclaims on
    # demand.
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def host_bytes() -> int:
    """Return the bytes of host memory that this process may use: the least of the host's, its cgroups'
    limits, and `ulimit -v`."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return min([*limits, *(limit for limit, _ in _cgroup_limits())])


def free_bytes() -> int:
    """Return the bytes that this process may allocate now: the least of the free memory of the host, of its
    cgroups, and of `ulimit -v`."""
    limits = [_available()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft - psutil.Process().memory_info().vms)
    limits += [limit - used for limit, used in _cgroup_limits()]
    return max(0, min(limits))


def _available() -> int:
    return psutil.virtual_memory().available


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Yield (bytes allowed, bytes used) for each cgroup with a limit, from this process's cgroup up to the
    root."""
    for kind, path in _own_cgroups():
        limit_file, used, given_back = _FILES[kind]
        root = CGROUPS / kind
        folder = root / path
        while True:
            limit = _number(folder / limit_file)
            if limit is not None:
                usage = (_number(folder / used) or 0) - _counted(folder / "memory.stat", given_back)
                yield limit, max(0, usage)
            if folder == root:
                break
            folder = folder.parent


def _own_cgroups() -> Iterator[tuple[str, str]]:
    """Yield ("" or "memory", the path below the root of that hierarchy) for each cgroup of this process;
    nothing if the system has no cgroups."""
    try:
        lines = OWN_CGROUPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system
        return
    for line in lines:
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if kinds == "" or "memory" in kinds.split(","):
            parts = [part for part in path.split("/") if part not in ("", "..")]
            yield "memory" if kinds else "", "/".join(parts)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # another version of cgroups, or a container that shows other paths
        return None
    return int(text) if text.isdigit() else None


def _counted(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
