"""What this machine computes with."""

from pathlib import Path


def processor() -> str:
    """The machine's processors: their name and what they can do. A cache may be shared by unlike machines."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines() if Path("/proc/cpuinfo").exists() else []
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
    return f"{found.get('model name', 'unknown')}; {found.get('flags', '')}"
