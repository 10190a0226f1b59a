"""Start time of a process's run: that of the process, if the command line or a supervisor started it for the
run."""

import time

from .heartbeat import heartbeat

_counts = False
_asked = False
_began: float | None = None


def count_from_process_start() -> None:
    """Start the run clock at process creation, so that interpreter start-up and imports count toward the
    run."""
    global _counts
    _counts = True


def start_run_clock() -> None:
    """Start the run clock now, for a process that has waited for work."""
    global _counts, _began
    _counts, _began = True, time.time()


def take_start_time() -> float:
    """Return the start time of the run that begins now, in seconds since the epoch. A second run of a process
    begins with this call."""
    global _asked
    # Asked here, not at the import: a program may still restart itself, and what has read its heartbeat's pipe closes it then.
    if _asked or not (_counts or heartbeat().is_supervised):
        return time.time()
    _asked = True
    if _began is not None:
        return _began
    import psutil

    return psutil.Process().create_time()
