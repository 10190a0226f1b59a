"""How many cores a process may use: the same number for every column."""

import os


def usable_cores() -> int:
    """The cores that the scheduler lets this process run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
