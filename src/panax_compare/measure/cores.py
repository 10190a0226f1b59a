"""Number of cores that a process may use, equal for every column."""

import os


def usable_cores() -> int:
    """Return the number of cores on which the scheduler runs this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
