"""An agent in a step of a batch job: `python -m panax.cluster.engines.slurm_agent`.

The job goes on when it loses a node (`--no-kill`), also the one with the batch script and the supervisor in it: Slurm then
keeps the job without a script until its time is up. An agent that has lost its supervisor has Slurm queue the job again.
"""

import os
import random
import sys
import time
from collections.abc import Callable, Mapping

from ...core.errors import LaunchError
from ..node.agent import RESTART_EXIT_CODE
from ..node.agent import main as agent
from .client import run_client

WATCH_SECONDS = 1800.0
"""For Slurm to know that a node is lost: SlurmdTimeout is five minutes where nobody has set it."""

LOOK_SECONDS = (5.0, 10.0)
"""Between two looks at the job, at random: all of its agents look."""


def main() -> int:
    code = agent()
    job = os.environ.get("SLURM_JOB_ID", "")
    if code == RESTART_EXIT_CODE and job:
        requeue(job, os.environ)
    return code


def requeue(job: str, environment: Mapping[str, str], sleep: Callable[[float], None] = time.sleep) -> bool:
    """Have a job queued again as soon as Slurm knows that its batch script is lost; whether it was.

    A job that ends, as it does where the script itself has ended, takes the steps with it, and so this process.
    """
    deadline = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        try:
            if has_lost_script(run_client(["scontrol", "--oneliner", "show", "job", job], environment), environment):
                run_client(["scontrol", "requeue", job], environment)
                return True
        except LaunchError:
            # Its controller is away, or another agent was first.
            pass
        sleep(random.uniform(*LOOK_SECONDS))
    return False


def has_lost_script(said: str, environment: Mapping[str, str]) -> bool:
    """Whether a job runs on, and the node that had its batch script is not of it any more.

    Args:
        said: What `scontrol --oneliner show job` says of it.
    """
    facts = dict(word.split("=", 1) for word in said.split() if "=" in word)
    script, nodes = facts.get("BatchHost", ""), facts.get("NodeList", "")
    if facts.get("JobState") != "RUNNING" or not script or not nodes:
        return False
    return script not in run_client(["scontrol", "show", "hostnames", nodes], environment).split()


if __name__ == "__main__":
    sys.exit(main())
