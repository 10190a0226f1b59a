"""First actions of a worker: it ends with its parent, and writes its stacks on request."""

import contextlib
import ctypes
import errno
import faulthandler
import io
import os
import signal
import sys
import threading
from typing import Any

from ...system.streams import write_last_words

LIFELINE_VARIABLE = "PANAX_LIFELINE"
"""Variable with the descriptor of an inherited pipe; only the agent holds its other end, so it ends when the
agent does."""

AGENT_VARIABLE = "PANAX_AGENT"
"""Variable with the agent's process id, if it is this worker's parent."""

STACKS_VARIABLE = "PANAX_STACKS"
"""Variable with the file to which SIGQUIT writes the stacks of all threads."""

ORPHANED_EXIT_CODE = 137
"""Exit code of a worker that has lost its agent: that of a killed process."""

_PR_SET_PDEATHSIG = 1


def install_guards() -> None:
    """Make a worker that Panax started end with its agent, and write its stacks on request.

    The kernel kills the worker when its agent ends (Linux), also while a thread holds Python's lock; on other
    systems, the end of a pipe does the same. A save is committed by one last write, so that a kill leaves no
    partial save.
    """
    agent = os.environ.get(AGENT_VARIABLE, "")
    if agent.isdecimal() and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(agent):
            os._exit(ORPHANED_EXIT_CODE)
    lifeline = os.environ.get(LIFELINE_VARIABLE, "")
    if lifeline.isdecimal():
        os.set_inheritable(int(lifeline), False)
        threading.Thread(target=_end_with, args=(int(lifeline),), name="lifeline", daemon=True).start()
    if os.environ.get(STACKS_VARIABLE, ""):
        sys.stdout, sys.stderr = _without_errors(1), _without_errors(2)
    if stacks := os.environ.get(STACKS_VARIABLE, ""):
        # A disk that refuses the file of stacks does not end training.
        with contextlib.suppress(OSError):
            write_stacks_on_signal(stacks)


def write_stacks_on_signal(path: str) -> None:
    """Write the stacks of all threads to a file on each SIGQUIT."""
    file = open(path, "a", encoding="utf-8")  # noqa: SIM115  (open for as long as the process lives)
    faulthandler.register(signal.SIGQUIT, file=file, all_threads=True)


class _Lossy(io.FileIO):
    """A log on a disk that may be full, read-only or broken: output that can't be written is dropped without an
    error."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
                raise
            return len(data)


def _without_errors(descriptor: int) -> io.TextIOWrapper:
    raw: Any = _Lossy(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def _end_with(lifeline: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(lifeline, 4096):
            pass
    write_last_words("panax: the supervisor is gone; this worker ends\n")
    os._exit(ORPHANED_EXIT_CODE)
