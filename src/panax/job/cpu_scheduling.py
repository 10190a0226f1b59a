"""Scheduling of the threads of a process on CPU, so that they don't disturb the thread that moves bytes
between processes."""

import contextlib
import os
import threading
import time
import warnings
from pathlib import Path

CHECK_SECONDS = 1.0
"""Interval between two measurements of the cores' use."""

MAX_OTHERS_SHARE = 0.15
"""Share of the cores that other programs may use; beyond it the cores count as busy with other work."""

MIN_IDLE_SHARE = 0.2
"""Below this share of the cores, this process does nothing that another program could disturb."""

NUM_CHECKS = 3
"""Consecutive busy measurements after which the cores count as busy: one alone may be a program that starts or ends."""

_watching: threading.Thread | None = None


def use_batch_policy_while_alone(sharing: int) -> None:
    """Prevent waking threads of this process from interrupting running ones, as long as no other program
    needs its cores.

    Gloo, which carries the collectives of processes on CPU, has one thread that waits for the network. If it
    interrupts the thread that holds its lock, it requests that lock over and over until the kernel's next
    tick, 4 ms later: on a process of one core a sum of 4 KiB took 4 ms, and takes 0.2 ms in Linux's batch
    policy. If other programs run on the same cores, the thread would have to wait for them, and a step takes
    up to twice as long: the default policy is then better. A thread selects the policy once a second
    (docs/decisions/0020-threads-of-a-process-on-cpu.md).

    The policy of threads that exist already is not changed. Without a batch policy in the system the call has no
    effect; if the system refuses the policy, a warning is printed. A second call changes nothing.

    Args:
        sharing: Number of processes of the same job that run on the same cores.
    """
    global _watching
    if _watching is None and hasattr(os, "SCHED_BATCH") and set_batch_policy(batch=True):
        _watching = threading.Thread(target=_watch, args=(sharing,), name="panax-cores", daemon=True)
        _watching.start()


def processes_on_these_cores(local: int) -> int:
    """Return the number of a job's processes on the cores of this one, given that `local` of them are on this
    host.

    A process that is restricted to some of the host's cores is assumed not to share them.
    """
    given = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return local if given == os.cpu_count() else 1


def set_batch_policy(*, batch: bool) -> bool:
    """Set the batch policy, or the usual one, for all threads of this process; later ones inherit it from
    those that start them.

    Returns:
        True if the system permits it.
    """
    before, after = (os.SCHED_OTHER, os.SCHED_BATCH) if batch else (os.SCHED_BATCH, os.SCHED_OTHER)
    for thread in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile.
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getscheduler(int(thread.name)) != before:
                continue
            try:
                os.sched_setscheduler(int(thread.name), after, os.sched_param(0))
            except PermissionError as error:
                warnings.warn(
                    f"this system does not let a process choose how its threads are scheduled ({error.strerror}); processes "
                    f"that share few cores will communicate more slowly",
                    stacklevel=2,
                )
                return False
    return True


class CoreLoad:
    """Meter of the use of this process's cores.

    Args:
        sharing: Number of processes of the same job that run on these cores; each is assumed to use as much
            time as this process.
    """

    def __init__(self, sharing: int):
        self._sharing = sharing
        self._cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._busy, self._idle, self._process_seconds = self._read_seconds()

    def shares(self) -> tuple[float, float]:
        """Return the shares of the cores' time that this process and other programs have used since the last
        call."""
        busy, idle, process_seconds = self._read_seconds()
        other_seconds = (busy - self._busy) - (process_seconds - self._process_seconds) * self._sharing
        passed = busy - self._busy + idle - self._idle
        process_share, other_share = (
            (process_seconds - self._process_seconds) / passed,
            max(other_seconds, 0.0) / passed,
        )
        self._busy, self._idle, self._process_seconds = busy, idle, process_seconds
        return process_share, other_share

    def _read_seconds(self) -> tuple[float, float, float]:
        """Return the seconds for which the cores were busy, for which they were idle, and for which this process
        ran."""
        busy = idle = 0
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *counted = line.split()
            if name in self._cores:
                user, nice, system, *rest = map(int, counted[:8])
                busy += user + nice + system
                idle += sum(rest)
        times = os.times()
        return busy / self._ticks, idle / self._ticks, times.user + times.system


def _watch(sharing: int) -> None:
    cores, batch, disturbed = CoreLoad(sharing), True, 0
    while True:
        time.sleep(CHECK_SECONDS)
        process_share, other_share = cores.shares()
        if process_share < MIN_IDLE_SHARE:
            continue
        disturbed = disturbed + 1 if other_share > MAX_OTHERS_SHARE else 0
        should_batch = disturbed < NUM_CHECKS
        if should_batch != batch and set_batch_policy(batch=should_batch):
            batch = should_batch
