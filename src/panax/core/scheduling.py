"""How the threads of a process on CPU share its cores with the thread that moves bytes between processes."""

import contextlib
import os
import warnings
from pathlib import Path


def run_in_batches() -> None:
    """Let no waking thread of this process interrupt one that runs (Linux's SCHED_BATCH), in all its threads and later ones.

    Gloo, which carries the collectives of processes on CPU, has one thread that waits for the network. Where it interrupts the
    thread that holds its lock, it asks for that lock over and over until the kernel's next tick, 4 ms later: on a process of one
    core a sum of 4 KiB took 4 ms, and takes 0.2 ms in batches (benchmarks/results/2026-11-23-processes.md).

    Threads of another policy than the usual one keep it. Where the system has no such policy nothing happens; where it refuses,
    that is a warning.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for thread in Path("/proc/self/task").iterdir():
        # A thread may end meanwhile.
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getscheduler(int(thread.name)) != os.SCHED_OTHER:
                continue
            try:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
            except PermissionError as error:
                warnings.warn(
                    f"this system does not let a process choose SCHED_BATCH ({error.strerror}); processes that share few cores "
                    f"will communicate more slowly",
                    stacklevel=2,
                )
                return
