"""An agent in a step of a batch job: `python -m panax.cluster.engines.slurm_agent`.

The job continues when it loses a node (`--no-kill`), even the one with the batch script and the supervisor:
Slurm then retains the job without a script until its time limit. An agent that has lost its supervisor makes
Slurm requeue the job.
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
"""Time for Slurm to notice that a node is lost: SlurmdTimeout is five minutes by default."""

LOOK_SECONDS = (5.0, 10.0)
"""Range of the random time between two queries of the job's state: all of its agents query it."""


def main() -> int:
    code = agent()
    job = os.environ.get("SLURM_JOB_ID", "")
    if code == RESTART_EXIT_CODE and job:
        requeue(job, os.environ)
    return code


def requeue(job: str, environment: Mapping[str, str], sleep: Callable[[float], None] = time.sleep) -> bool:
    """Requeue a job as soon as Slurm knows that its batch script is lost; return True if it was.

    If the script itself has ended, the job ends with its steps, including this process.
    """
    deadline = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        try:
            if has_lost_script(run_client(["scontrol", "--oneliner", "show", "job", job], environment), environment):
                run_client(["scontrol", "requeue", job], environment)
                return True
        except LaunchError:
            # Its controller is unavailable, or another agent was first.
            pass
        sleep(random.uniform(*LOOK_SECONDS))
    return False


def has_lost_script(job_text: str, environment: Mapping[str, str]) -> bool:
    """Return True if a job is running without the node that ran its batch script.

    Args:
        job_text: Output of `scontrol --oneliner show job`.
    """
    facts = dict(word.split("=", 1) for word in job_text.split() if "=" in word)
    script, nodes = facts.get("BatchHost", ""), facts.get("NodeList", "")
    if facts.get("JobState") != "RUNNING" or not script or not nodes:
        return False
    return script not in run_client(["scontrol", "show", "hostnames", nodes], environment).split()


if __name__ == "__main__":
    sys.exit(main())
