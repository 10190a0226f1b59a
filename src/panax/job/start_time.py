"""When a process's turn at a run began: with the process, where the command line or a supervisor started it for that."""

import time

from .heartbeat import heartbeat

_counts = heartbeat().is_supervised
_asked = False
_began: float | None = None


def count_from_process_start() -> None:
    """Count the first run of this process from the process's own beginning: what Python and its imports took is the run's."""
    global _counts
    _counts = True


def start_run_clock() -> None:
    """Count the first run of this process from now on: the process has waited for its work until now."""
    global _counts, _began
    _counts, _began = True, time.time()


def take_start_time() -> float:
    """When the run that begins now did, in seconds since the epoch. A second run of a process begins when this is asked."""
    global _asked
    if _asked or not _counts:
        return time.time()
    _asked = True
    if _began is not None:
        return _began
    import psutil

    return psutil.Process().create_time()
