"""Entry point of a job's pods on Kubernetes: `python -m panax.cluster.engines.pod launch ...`.

The first pod launches again, as the job's supervisor together with an agent. The others are only agents: they
wait until the first one listens, which may be minutes later.
"""

import os
import sys
from collections.abc import Mapping, Sequence

from ...core.errors import LaunchError
from ..node.agent import RESTART_EXIT_CODE
from .client import wait_for_port
from .engine import AGENT_COMMAND
from .environment import SUPERVISOR

INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
"""Variable with the pod's index, set by Kubernetes."""

FIRST_SECONDS = 900.0
"""Time for the first pod to be placed, to pull its image, and to listen."""


def pod_command(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command for the pod of this environment.

    Raises:
        LaunchError: The environment is not that of a job's pod, or the first pod did not listen in time.

    >>> pod_command(["launch", "gpt2"], {"JOB_COMPLETION_INDEX": "0"})[1:]
    ['-m', 'panax', 'launch', 'gpt2']
    """
    index = environment.get(INDEX_VARIABLE, "")
    if not index.isdecimal():
        raise LaunchError(
            f"{INDEX_VARIABLE}={index!r}; expected a pod's number, as Kubernetes gives to those of an indexed job"
        )
    if index == "0":
        return [sys.executable, "-m", "panax", *arguments]
    host, _, port = environment[SUPERVISOR].rpartition(":")
    if not wait_for_port(host, int(port), FIRST_SECONDS):
        raise LaunchError(
            f"the job's first pod did not listen at {host}:{port} within {FIRST_SECONDS:.0f} s; see its log"
        )
    return list(AGENT_COMMAND)


def main() -> int:
    """Replace this process by the pod's command."""
    try:
        command = pod_command(sys.argv[1:], os.environ)
    except LaunchError as error:
        print(f"panax: {error}", file=sys.stderr)
        # Not one of the codes that end a job for good: the first pod may start later.
        return RESTART_EXIT_CODE
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main())
