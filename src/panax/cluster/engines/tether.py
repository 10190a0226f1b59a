"""A command that ends when its standard input closes: `python -m panax.cluster.engines.tether COMMAND...`.

An actor of Ray may be killed without notice, and its children live on; a pipe of the actor's ends with it.
Ray also kills the direct children of a dead actor, such as this process: the command then gets a signal from
the kernel.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from ...system.children import end_process

GRACE_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL."""

PR_SET_PDEATHSIG = 1
"""Option of Linux's `prctl` that requests a signal when the parent process exits."""

LOOK_SECONDS = 0.5
"""Seconds between checks of the command."""


def run_tethered(command: Sequence[str], tether: int = 0) -> int:
    """Run a command as long as a pipe is open.

    Args:
        tether: Read end of the pipe.

    Returns:
        The command's exit code.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with(os.getpid())
    )
    while process.poll() is None:
        if select.select([tether], [], [], LOOK_SECONDS)[0] and not os.read(tether, 1024):
            end_process(process, 0.0, grace=GRACE_SECONDS, group=True)
    return process.returncode


def _end_with(parent: int) -> Callable[[], None] | None:
    """Return the function that makes a child end with its parent, to call before its command; None except on
    Linux."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)

    return ask


if __name__ == "__main__":
    code = run_tethered(sys.argv[1:])
    # Like a shell's exit code for a command ended by a signal.
    sys.exit(code if code >= 0 else 128 - code)
