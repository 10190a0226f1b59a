"""What a worker does before anything else: it dies with whoever started it, and shows its stacks when asked."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading

LIFELINE = "PANAX_LIFELINE"
"""The number of an inherited pipe whose other end the agent alone holds: it ends when the agent does."""

AGENT = "PANAX_AGENT"
"""The agent's process, where it is this worker's parent."""

STACKS = "PANAX_STACKS"
"""The file to which SIGUSR1 writes the stacks of all threads."""

ORPHANED = 137
"""The exit code of a worker whose agent is gone: as if killed."""

_PR_SET_PDEATHSIG = 1


def guard() -> None:
    """In a worker that Panax started: see to it that no orphan is left, and that a stall can be looked into.

    The kernel kills the worker when its agent ends (Linux), also while a thread holds Python's lock; a pipe that ends says
    the same elsewhere. What is saved is committed by one last write, so that a kill tears nothing.
    """
    agent = os.environ.get(AGENT, "")
    if agent.isdecimal() and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(agent):
            os._exit(ORPHANED)
    lifeline = os.environ.get(LIFELINE, "")
    if lifeline.isdecimal():
        os.set_inheritable(int(lifeline), False)
        threading.Thread(target=_end_with, args=(int(lifeline),), name="lifeline", daemon=True).start()
    if stacks := os.environ.get(STACKS, ""):
        show_stacks(stacks)


def show_stacks(path: str) -> None:
    """Write the stacks of all threads to a file whenever SIGUSR1 comes."""
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (open for as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def _end_with(lifeline: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(lifeline, 4096):
            pass
    sys.stderr.write("panax: the supervisor is gone; this worker ends\n")
    sys.stderr.flush()
    os._exit(ORPHANED)
