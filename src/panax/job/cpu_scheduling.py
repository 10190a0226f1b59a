"""How the threads of a process on CPU share its cores with the thread that moves bytes between processes."""

import contextlib
import os
import threading
import time
import warnings
from pathlib import Path

CHECK_SECONDS = 1.0
"""Between two looks at who uses the cores."""

MAX_OTHERS_SHARE = 0.15
"""The share of the cores that other programs may use; beyond it they count as busy with something else."""

MIN_IDLE_SHARE = 0.2
"""Below this share of the cores this process does nothing that another program could disturb."""

NUM_CHECKS = 3
"""In a row that find the cores busy, until they count as that: a program that ends or begins is not there to stay."""

_watching: threading.Thread | None = None


def use_batch_policy_while_alone(sharing: int) -> None:
    """Let no waking thread of this process interrupt one that runs, as long as no other program wants its cores.

    Gloo, which carries the collectives of processes on CPU, has one thread that waits for the network. Where it interrupts the
    thread that holds its lock, it asks for that lock over and over until the kernel's next tick, 4 ms later: on a process of one
    core a sum of 4 KiB took 4 ms, and takes 0.2 ms in Linux's batch policy. Where other programs run on the same cores the
    thread would have to wait for them, and a step takes up to twice as long: there the usual policy is better. A thread looks
    once a second which it is (docs/decisions/0020-threads-of-a-process-on-cpu.md).

    Threads of a policy of their own keep it. Where the system has no such policy nothing happens; where it refuses, that is a
    warning. A second call changes nothing.

    Args:
        sharing: How many processes of the same job run on the same cores.
    """
    global _watching
    if _watching is None and hasattr(os, "SCHED_BATCH") and set_batch_policy(batch=True):
        _watching = threading.Thread(target=_watch, args=(sharing,), name="panax-cores", daemon=True)
        _watching.start()


def processes_on_these_cores(local: int) -> int:
    """How many of a job's processes run on the cores of this one, `local` of which are on this host.

    A process that was given cores has them for itself.
    """
    given = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return local if given == os.cpu_count() else 1


def set_batch_policy(*, batch: bool) -> bool:
    """Give all threads of this process the batch policy, or the usual one; later ones get it from those that start them.

    Returns:
        Whether the system lets it.
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


class CoreUsage:
    """Who uses the cores of this process.

    Args:
        sharing: How many processes of the same job run on them; they are taken to use as much as this one.
    """

    def __init__(self, sharing: int):
        self._sharing = sharing
        self._cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._busy, self._idle, self._own = self._now()

    def shares(self) -> tuple[float, float]:
        """The shares of the cores' time that this process and other programs have used since the last call."""
        busy, idle, own = self._now()
        used = (busy - self._busy) - (own - self._own) * self._sharing
        passed = busy - self._busy + idle - self._idle
        mine, others = (own - self._own) / passed, max(used, 0.0) / passed
        self._busy, self._idle, self._own = busy, idle, own
        return mine, others

    def _now(self) -> tuple[float, float, float]:
        """Seconds that the cores were busy with programs, that they were not, and that this process ran."""
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
    cores, batch, disturbed = CoreUsage(sharing), True, 0
    while True:
        time.sleep(CHECK_SECONDS)
        mine, others = cores.shares()
        if mine < MIN_IDLE_SHARE:
            continue
        disturbed = disturbed + 1 if others > MAX_OTHERS_SHARE else 0
        wanted = disturbed < NUM_CHECKS
        if wanted != batch and set_batch_policy(batch=wanted):
            batch = wanted
