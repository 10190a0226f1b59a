"""Information on this machine's processor."""

import platform
from collections.abc import Iterator
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def describe_processor() -> str:
    """Return the name and the features of the machine's processors; different machines may share a cache."""
    fields = _fields()
    # Arm's have no name there, but the numbers of the implementer and of the part.
    parts = (fields.get("CPU implementer", ""), fields.get("CPU part", ""))
    name = fields.get("model name") or " ".join(filter(None, parts)) or platform.processor() or "unknown"
    return f"{name}; {_listed(fields)}"


def cpu_flags() -> frozenset[str]:
    """Return the features of the processor, by the names that Linux lists; empty if the system does not list
    them."""
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return frozenset({"asimd"})  # All of Apple's have it.
    return frozenset(_listed(_fields()).split())


def _listed(fields: dict[str, str]) -> str:
    return fields.get("flags") or fields.get("Features", "")


def _fields() -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo."""
    return {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(list(_lines())))
    }


def _lines() -> Iterator[str]:
    try:
        yield from CPUINFO.read_text(errors="replace").splitlines()
    except OSError:
        return
