"""Agents in a Slurm allocation: under `srun` on its nodes; in place of a node that Slurm has removed from the
allocation, in a separate job."""

import re
from collections.abc import Mapping, Sequence

from ...core.errors import LaunchError
from .client import ClientProcess, run_client
from .environment import NODE

FOLDER_VARIABLE = "PANAX_SLURM_FOLDER"
"""Set by the batch script: folder for its output, and that of the jobs that it submits."""

_TAKEN = re.compile(r"\bPreemptTime=\d")
"""Part of Slurm's description of a job that is preempted."""

REQUEUE_EXIT_CODE = 75
"""Exit code of a launch that Slurm starts again."""


class SlurmAgents:
    """Agents under `srun`, and one more srun, or job, for each replaced agent.

    Args:
        command: The srun that starts all agents.
        hosts: Hosts of the allocation, as it was granted.
        extra_node: The `sbatch` that requests one more node; empty if not allowed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        hosts: Sequence[str],
        extra_node: Sequence[str] = (),
    ):
        self._command, self._environment, self._hosts = list(command), dict(environment), list(hosts)
        self._extra_node = list(extra_node)
        self._all = ClientProcess(self._command, self._environment)
        self._later: dict[int, ClientProcess] = {}
        self._jobs: dict[int, str] = {}

    def failure(self) -> str:
        found = [each.failure() for each in (self._all, *self._later.values())]
        # The step of all agents ends when only replaced agents were left in it.
        if found[0] and (self._later or self._jobs) and not all(found[1:]):
            found = found[1:]
        return "\n".join(each for each in found if each)

    def log_tail(self) -> str:
        return "\n".join(each for each in (one.log_tail() for one in (self._all, *self._later.values())) if each)

    def replace(self, node: int) -> None:
        """Start an agent on the same machine; if Slurm has removed the machine from the allocation, on any machine
        that the queue grants."""
        if not 0 <= node < len(self._hosts):
            raise LaunchError(f"the job has nodes 0 to {len(self._hosts) - 1}; there is no node {node}")
        if node in self._later:
            self._later.pop(node).close(0.0)
        host = self._hosts[node]
        if self._extra_node and host not in (granted := self._granted()):
            self._ask_for(node, granted)
            return
        one = [each for each in self._command if not each.startswith(("--nodes=", "--ntasks="))]
        one[1:1] = ["--nodes=1", "--ntasks=1", f"--nodelist={host}"]
        self._later[node] = ClientProcess(one, {**self._environment, NODE: str(node)})

    def start_over(self, *, preempted: bool = False) -> int | None:
        """Requeue the job, if it is a batch job; Slurm itself only does so if it had to kill a job that it
        preempts."""
        job = self._environment["SLURM_JOB_ID"]
        if not self._environment.get(FOLDER_VARIABLE):
            return None
        if preempted and not _TAKEN.search(self._answer_or_empty("scontrol", "--oneliner", "show", "job", job)):
            return None
        try:
            run_client(["scontrol", "requeue", job], self._environment)
        except LaunchError:
            return None
        return REQUEUE_EXIT_CODE

    def close(self) -> None:
        for each in (self._all, *self._later.values()):
            each.close()
        jobs, self._jobs = self._jobs, {}
        if jobs:
            # Running ones have ended with their agents; others are still queued.
            self._answer_or_empty("scancel", "--quiet", *jobs.values())

    def _granted(self) -> Sequence[str]:
        """Return the allocation's current hosts, without failed ones."""
        nodes = self._answer_or_empty(
            "squeue", "--noheader", f"--jobs={self._environment['SLURM_JOB_ID']}", "--format=%N"
        ).strip()
        return self._answer_or_empty("scontrol", "show", "hostnames", nodes).split() if nodes else self._hosts

    def _ask_for(self, node: int, granted: Sequence[str]) -> None:
        """Submit a job of one agent, on none of the remaining nodes; do nothing if such a job is queued or
        running."""
        if node in self._jobs:
            state = self._answer_or_empty("squeue", "--noheader", f"--jobs={self._jobs[node]}", "--format=%T")
            if state.strip():
                return
        # Variables of this job would be taken for the other one's.
        kept = {name: value for name, value in self._environment.items() if not name.startswith("SLURM_")}
        kept |= {name: self._environment[name] for name in ("SLURM_CONF",) if name in self._environment}
        command = [*self._extra_node[:1], f"--exclude={','.join(granted)}", *self._extra_node[1:]]
        self._jobs[node] = run_client(command, {**kept, NODE: str(node)}).strip().split(";")[0]

    def _answer_or_empty(self, *command: str) -> str:
        try:
            return run_client(command, self._environment)
        except LaunchError:
            return ""
