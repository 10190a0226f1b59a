"""Pool of a job's nodes: lost nodes are requested again, and meanwhile the job continues with the remaining
nodes."""

import time
from collections.abc import Callable

from ...core.errors import LaunchError
from ..engines import RunningAgents
from ..job import Job
from .job_layout import JobShape, JobShapes, cordon
from .nodes import Node, Nodes

ASK_AGAIN_SECONDS = 30.0
"""Seconds between two requests to an engine for a lost node while the job continues without it."""

MOST_PER_CPU = 2
"""Maximum number of a job's processes per processor."""


class NodePool:
    """Nodes of one job, and the layouts that they allow.

    Args:
        say: Called with messages for the user.
    """

    def __init__(self, job: Job, nodes: Nodes, placed: RunningAgents, say: Callable[[str], None]):
        self._job, self._nodes, self._placed, self._say = job, nodes, placed, say
        self._shapes = JobShapes.of(job)
        self._asked_at: dict[int, float] = {}
        self._refused: set[int] = set()
        self._gathered = False

    def gather(self, pump: Callable[[], None], given_up: Callable[[], bool]) -> JobShape | None:
        """Wait for the job's nodes; for lost nodes only a limited time, if the model has a layout on the
        remaining ones.

        Args:
            pump: Processes agents' messages for a moment.
            given_up: Returns True if the wait is to end.

        Returns:
            The nodes and layout to run on; None if `given_up` ended the wait.

        Raises:
            LaunchError: Too few nodes have connected, or they are not alike.
        """
        self.ask_for_missing(lost=True)
        policy, began = self._job.policy, time.monotonic()
        # Initially all of them are still starting.
        patience = policy.replace_seconds if self._gathered else policy.agents_seconds
        while not given_up():
            shape, waited = self._shapes.best(self._nodes.here), time.monotonic() - began
            complete = not self._missing()
            if shape is not None and (complete or waited > patience):
                check_alike([self._nodes.here[number] for number in shape.nodes], self._job)
                self._gathered = True
                return shape
            pump()
            if self._gathered:
                self.ask_for_missing()
            if shape is None and (why := self._placed.failure()):
                raise LaunchError(why)
            if shape is None and waited > policy.agents_seconds:
                raise LaunchError(self._who_is_missing())
        return None

    def ask_for_missing(self, *, lost: bool = False) -> None:
        """Request missing nodes from the engine, at intervals; a refusal is reported once.

        Args:
            lost: True to request only lost nodes, immediately, since the job waits for them.

        Raises:
            LaunchError: The engine can't provide the nodes, and the job, which waits, can't continue without
                them.
        """
        now = time.monotonic()
        for number in self._missing():
            since = now - self._asked_at.get(number, now - ASK_AGAIN_SECONDS)
            if number not in self._nodes.lost if lost else since < ASK_AGAIN_SECONDS:
                continue
            self._asked_at[number] = now
            try:
                self._placed.replace(number)
            except LaunchError as error:
                # While processes still run, their failure is reported first.
                if lost and self._shapes.best(self._nodes.here) is None:
                    raise LaunchError(
                        f"node {number} could not be replaced ({error}), and the job can't continue without it: layouts for "
                        f"fewer nodes are known after its first step on all, and --min-nodes is {self._job.policy.min_nodes}"
                    ) from error
                if number not in self._refused:
                    self._refused.add(number)
                    self._say(f"node {number} could not be replaced: {error}")

    def reject_shape(self, shape: JobShape) -> bool:
        """Return True if there is an alternative to a layout that could not take a step: another layout, or
        waiting for nodes."""
        if shape.layout is None:
            return False
        self._shapes.reject(shape.layout)
        return True

    def can_spare(self, node: int) -> bool:
        """Return True if the job could continue without a node, according to its policy and the known
        layouts."""
        return self._shapes.best_without(set(self._nodes.here), self._shapes.cordoned | {node}) is not None

    def cordon(self, node: int, why: str) -> None:
        """Remove a node from the job at the next save.

        Raises:
            LaunchError: The job could not continue without the node.
        """
        cordon(self._shapes, self._job.place, [node], why, total=self._job.nodes)

    def cordoned_in_use(self, shape: JobShape) -> list[int]:
        """Return the cordoned nodes in use, without which the job could not continue."""
        return sorted(set(shape.nodes) & self._shapes.cordoned)

    def reason_to_change(self, shape: JobShape) -> str | None:
        """Return why the job should continue on other nodes from its next save; None if the current ones are
        the best."""
        best = self._shapes.best(self._nodes.here)
        if best is None or best.nodes == shape.nodes:
            return None
        cordoned = sorted(set(shape.nodes) & self._shapes.cordoned)
        if cordoned:
            return f"node {', '.join(map(str, cordoned))} was taken out of the job"
        if len(best.nodes) > len(shape.nodes):
            return f"node {', '.join(map(str, sorted(set(best.nodes) - set(shape.nodes))))} is back"
        return None

    def _missing(self) -> list[int]:
        """Return the nodes that should be connected and are not."""
        return sorted({*range(self._job.nodes)} - {*self._nodes.here} - self._shapes.cordoned)

    def _who_is_missing(self) -> str:
        job, connected, refused = self._job, self._nodes.here, self._nodes.refused
        missing = ", ".join(str(number) for number in range(job.nodes) if number not in connected) or "none"
        strangers = f"; {refused} connections without the job's secret were refused" if refused else ""
        log_tail = self._placed.log_tail()
        return (
            f"{len(connected)} of {job.nodes} nodes connected within {job.policy.agents_seconds:.0f} s (missing: node "
            f"{missing}){strangers}; check that they can reach this host, and the engine's own log"
            + (f":\n{log_tail}" if log_tail else "")
        )


def check_alike(nodes: list[Node], job: Job) -> None:
    """Check that hosts have the same versions, and enough processors for their processes.

    Raises:
        LaunchError: The hosts differ, or have too few processors; the message names the differences.
    """
    for package in sorted({name for node in nodes for name in node.facts.get("versions", {})}):
        hosts_by_version: dict[str, list[str]] = {}
        for node in nodes:
            hosts_by_version.setdefault(node.facts.get("versions", {}).get(package, "missing"), []).append(node.host)
        if len(hosts_by_version) > 1:
            listed = "; ".join(
                f"{version} on {', '.join(sorted(set(hosts)))}" for version, hosts in sorted(hosts_by_version.items())
            )
            raise LaunchError(f"the hosts have different versions of {package}: {listed}; install the same on all")
    for node in nodes:
        cpus, gpus = int(node.facts.get("cpus", 1)), int(node.facts.get("gpus", 0))
        if gpus and (job.processes_per_node > gpus or gpus % job.processes_per_node):
            raise LaunchError(
                f"{job.processes_per_node} processes on {node.host}, which has {gpus} GPUs for them: each takes the "
                f"same number; start {', '.join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)} on a node, or "
                f"set JAX_PLATFORMS=cpu"
            )
        if job.processes_per_node > MOST_PER_CPU * cpus:
            raise LaunchError(
                f"{job.processes_per_node} processes on {node.host}, which has {cpus} processors: they would starve each other; "
                f"start at most {MOST_PER_CPU * cpus} (--processes), with several devices each"
            )
