"""Which of a job's nodes are here: lost ones are asked for again, and the job continues with those that are left meanwhile."""

import time
from collections.abc import Callable

from ...core.errors import LaunchError
from ..engines import RunningAgents
from ..job import Job
from .job_layout import JobShape, JobShapes, cordon
from .nodes import Node, Nodes

ASK_AGAIN_SECONDS = 30.0
"""Between two times that an engine is asked for a node that has not come back while the job goes on without it."""

MOST_PER_CPU = 2
"""Processes of a job on one processor."""


class NodePool:
    """The nodes of one job, and the worlds that they make.

    Args:
        say: Takes what a person should know.
    """

    def __init__(self, job: Job, nodes: Nodes, placed: RunningAgents, say: Callable[[str], None]):
        self._job, self._nodes, self._placed, self._say = job, nodes, placed, say
        self._worlds = JobShapes.of(job)
        self._asked_at: dict[int, float] = {}
        self._refused: set[int] = set()
        self._gathered = False

    def gather(self, pump: Callable[[], None], given_up: Callable[[], bool]) -> JobShape | None:
        """Wait for the job's nodes; for lost ones only a while, where the model can be laid out on those that are left.

        Args:
            pump: Takes in what agents tell, for a moment.
            given_up: Whether nobody waits any more.

        Returns:
            Where to run; None where it was given up.

        Raises:
            LaunchError: Too few have come, or they are not alike.
        """
        self.ask_for_missing(lost=True)
        policy, began = self._job.policy, time.monotonic()
        # At first all of them are on their way.
        patience = policy.replace_seconds if self._gathered else policy.agents_seconds
        while not given_up():
            world, waited = self._worlds.best(self._nodes.here), time.monotonic() - began
            complete = not self._missing()
            if world is not None and (complete or waited > patience):
                check_alike([self._nodes.here[number] for number in world.nodes], self._job)
                self._gathered = True
                return world
            pump()
            if self._gathered:
                self.ask_for_missing()
            if world is None and (why := self._placed.failure()):
                raise LaunchError(why)
            if world is None and waited > policy.agents_seconds:
                raise LaunchError(self._who_is_missing())
        return None

    def ask_for_missing(self, *, lost: bool = False) -> None:
        """Ask the engine for the nodes that are not here, now and then; one that can't give them back is believed.

        Args:
            lost: Those alone that have gone, at once: the job stands still.

        Raises:
            LaunchError: The engine can't, and the job, which stands still, can't go on without them.
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
                # While processes still run, it is they that fail first.
                if lost and self._worlds.best(self._nodes.here) is None:
                    raise LaunchError(
                        f"node {number} does not come back ({error}), and the job can't continue without it: it learns a "
                        f"layout on fewer nodes when it first trains on all, and keeps --min-nodes {self._job.policy.min_nodes}"
                    ) from error
                if number not in self._refused:
                    self._refused.add(number)
                    self._say(f"node {number} does not come back: {error}")

    def reject_shape(self, world: JobShape) -> bool:
        """Whether there is another way on than a world that could not take a step: another layout, or waiting for nodes."""
        if world.layout is None:
            return False
        self._worlds.reject(world.layout)
        return True

    def can_spare(self, node: int) -> bool:
        """Whether the job could go on without a node, by its policy and the layouts that there are."""
        return self._worlds.best_without(set(self._nodes.here), self._worlds.cordoned | {node}) is not None

    def cordon(self, node: int, why: str) -> None:
        """Leave a node out from the next save.

        Raises:
            LaunchError: The job could not go on without it.
        """
        cordon(self._worlds, self._job.place, [node], why, total=self._job.nodes)

    def cordoned_in_use(self, world: JobShape) -> list[int]:
        """The nodes of a world that were taken out, and without which the job could not go on."""
        return sorted(set(world.nodes) & self._worlds.cordoned)

    def reason_to_change(self, world: JobShape) -> str | None:
        """Why the job should go on in another world from its next save; None where this one is the best there is."""
        best = self._worlds.best(self._nodes.here)
        if best is None or best.nodes == world.nodes:
            return None
        out = sorted(set(world.nodes) & self._worlds.cordoned)
        if out:
            return f"node {', '.join(map(str, out))} was taken out of the job"
        if len(best.nodes) > len(world.nodes):
            return f"node {', '.join(map(str, sorted(set(best.nodes) - set(world.nodes))))} is back"
        return None

    def _missing(self) -> list[int]:
        """The nodes that should be here and are not."""
        return sorted({*range(self._job.nodes)} - {*self._nodes.here} - self._worlds.cordoned)

    def _who_is_missing(self) -> str:
        job, here, refused = self._job, self._nodes.here, self._nodes.refused
        missing = ", ".join(str(number) for number in range(job.nodes) if number not in here) or "none"
        strangers = f"; {refused} connections did not know the job's secret" if refused else ""
        said = self._placed.log_tail()
        return (
            f"{len(here)} of {job.nodes} nodes came within {job.policy.agents_seconds:.0f} s (missing: node {missing})"
            f"{strangers}; see that they can reach this host, and the engine's own log" + (f":\n{said}" if said else "")
        )


def check_alike(nodes: list[Node], job: Job) -> None:
    """See that hosts have the same versions, and processors for their processes.

    Raises:
        LaunchError: They don't; the message names who has what.
    """
    for package in sorted({name for node in nodes for name in node.facts.get("versions", {})}):
        found: dict[str, list[str]] = {}
        for node in nodes:
            found.setdefault(node.facts.get("versions", {}).get(package, "missing"), []).append(node.host)
        if len(found) > 1:
            listed = "; ".join(
                f"{version} on {', '.join(sorted(set(hosts)))}" for version, hosts in sorted(found.items())
            )
            raise LaunchError(f"the hosts have different versions of {package}: {listed}; install the same on all")
    for node in nodes:
        cpus, gpus = int(node.facts.get("cpus", 1)), int(node.facts.get("gpus", 0))
        if gpus and (job.processes_per_node > gpus or gpus % job.processes_per_node):
            raise LaunchError(
                f"{job.processes_per_node} processes on {node.host}, which has {gpus} GPUs for them: each takes as many; start "
                f"{', '.join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)} on a node, or set JAX_PLATFORMS=cpu"
            )
        if job.processes_per_node > MOST_PER_CPU * cpus:
            raise LaunchError(
                f"{job.processes_per_node} processes on {node.host}, which has {cpus} processors: they would starve each other; "
                f"start at most {MOST_PER_CPU * cpus} (--processes), with several devices each"
            )
