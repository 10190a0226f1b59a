"""Nodes that a job runs on at one time, and the layout of the model on them: all of its nodes, or the
remaining ones.

Process 0 writes the layouts for every smaller count of processes once the whole job has begun; so the
supervisor reads a file and does not import jax. A user, or a policy, takes a node out of the job by writing
its number to a file in the same folder.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...core.errors import LaunchError
from ...system import json_reader
from ...system.replacement import replace_json
from ..job import Job
from .job_folder import CORDONED, JOB, LAYOUTS, read_job_file

MESH_AXES = ("replica", "stage", "fsdp", "expert", "context", "tensor")
"""The only names that a layout may contain."""


@dataclasses.dataclass(frozen=True)
class JobLayout:
    """Layout of the model on a smaller number of processes.

    Attributes:
        mesh: Mesh axis to size, for all axes.
        micro_batches: Number of parts of the global batch, so that a device holds at most as many rows at a
            time as before.
        pad_rows: True if the batch is padded with rows of weight zero.
    """

    mesh: Mapping[str, int]
    micro_batches: int
    pad_rows: bool = False

    @property
    def flags(self) -> list[str]:
        """Return the flags for `panax train`."""
        mesh = [word for axis in MESH_AXES for word in (f"--mesh.{axis}", str(self.mesh[axis]))]
        rows = ["--step.pad-rows"] if self.pad_rows else []
        return [*mesh, "--step.micro-batches", str(self.micro_batches), *rows]

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis}={self.mesh[axis]}" for axis in MESH_AXES if self.mesh[axis] > 1) or "one device"
        micro_batches = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return sizes + micro_batches + (", rows filled up" if self.pad_rows else "")

    @classmethod
    def from_json(cls, content: Any) -> "JobLayout":
        """Read a layout from the content that process 0 has written.

        Raises:
            ValueError: The content is invalid.
        """
        mesh, micro_batches = content["mesh"], content["micro_batches"]
        sizes = {axis: mesh[axis] for axis in MESH_AXES}
        if not all(type(number) is int and number > 0 for number in (*sizes.values(), micro_batches)):
            raise ValueError("expected sizes of at least 1")
        return cls(sizes, micro_batches, bool(content.get("pad_rows")))


@dataclasses.dataclass(frozen=True)
class JobShape:
    """Nodes and layout of one attempt.

    Attributes:
        nodes: Numbers of the nodes; the job's process 0 is on the first.
        layout: Layout of the model; None for the layout with which the job was launched.
    """

    nodes: tuple[int, ...]
    layout: JobLayout | None = None

    def describe(self, total: int) -> str:
        """Format the nodes and layout for users."""
        nodes = f"{len(self.nodes)} of {total} nodes"
        return nodes if self.layout is None else f"{nodes}: {self.layout}"


class JobShapes:
    """Sets of nodes and layouts that a job may run on, best first.

    Args:
        folder: Folder of the job's files.
        nodes, processes: Number of all nodes and processes of the job.
        min_nodes: Minimum number of remaining nodes.
    """

    def __init__(self, folder: Path, *, nodes: int, processes: int, min_nodes: int):
        self._folder, self._nodes, self._processes = folder, nodes, processes
        self._min_nodes = max(min_nodes, 1)
        self._rejected: list[JobLayout] = []

    @classmethod
    def of(cls, job: Job) -> "JobShapes":
        """Create the shapes of a job that is launched here."""
        return cls(job.place, nodes=job.nodes, processes=job.processes, min_nodes=job.policy.min_nodes)

    @classmethod
    def from_folder(cls, folder: Path) -> "JobShapes":
        """Create the shapes of a job from its files.

        Raises:
            LaunchError: The files can't be read.
        """
        description = read_job_file(folder / JOB)
        try:
            nodes, processes = int(description["nodes"]), int(description["processes"])
            return cls(folder, nodes=nodes, processes=processes, min_nodes=int(description["policy"]["min_nodes"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise LaunchError(f"{folder / JOB} does not describe a job: {error!r}; `panax launch` writes it") from error

    def reject(self, layout: JobLayout) -> None:
        """Exclude a layout that the model could not use; the next best layout is used instead."""
        self._rejected.append(layout)

    def best(self, connected: Collection[int]) -> JobShape | None:
        """Return the largest set of the connected nodes with a layout of the model; None if there is none.

        Cordoned nodes are excluded, unless the job can't continue without them.
        """
        return self.best_without(connected, self.cordoned) or (
            self.best_without(connected, ()) if self.cordoned & {*connected} else None
        )

    def best_without(self, connected: Collection[int], excluded: Collection[int]) -> JobShape | None:
        """Return the largest set of the connected nodes, without `excluded`, with a layout of the model; None if
        there is none."""
        usable = sorted({*connected} - {*excluded})
        if len(usable) >= self._nodes:
            return JobShape(tuple(usable))
        layouts = self._layouts()
        for count in range(len(usable), self._min_nodes - 1, -1):
            if (layout := layouts.get(count * (self._processes // self._nodes))) is not None:
                return JobShape(tuple(usable[:count]), layout)
        return None

    def explain_infeasible(self, excluded: Collection[int]) -> str:
        """Return why the job could not continue without the `excluded` nodes, if all others were connected;
        empty if it could."""
        num_remaining = self._nodes - len({*excluded})
        if not num_remaining:
            return f"all {self._nodes} nodes of the job would be taken out"
        if num_remaining < self._min_nodes:
            return (
                f"{num_remaining} of {self._nodes} nodes would be left, and the job keeps --min-nodes {self._min_nodes}"
            )
        if self.best_without(range(self._nodes), excluded) is not None:
            return ""
        if not (self._folder / LAYOUTS).is_file():
            return "the job has not yet taken a step on all of its nodes, after which layouts for fewer nodes are known"
        return f"the run can't be laid out on {num_remaining} of {self._nodes} nodes"

    @property
    def cordoned(self) -> set[int]:
        """Return the cordoned nodes."""
        return set(read_cordoned(self._folder))

    def _layouts(self) -> dict[int, JobLayout]:
        """Read the best layout for each number of processes; empty before the first start on all nodes, and if
        the file can't be used."""
        try:
            content = json_reader.read(self._folder / LAYOUTS)
            if content["processes"] != self._processes:
                return {}
            listed = {int(count): [*map(JobLayout.from_json, ranked)] for count, ranked in content["layouts"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        candidates = {
            count: [each for each in ranked if each not in self._rejected] for count, ranked in listed.items()
        }
        return {count: ranked[0] for count, ranked in candidates.items() if ranked}


def read_cordoned(folder: Path) -> dict[int, str]:
    """Return the cordoned nodes of a job, each with the reason; an invalid file counts as empty."""
    try:
        reasons = json_reader.read(folder / CORDONED)
        return {int(node): str(why) for node, why in reasons.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def cordon(shapes: JobShapes, folder: Path, nodes: Iterable[int], why: str, *, total: int) -> None:
    """Take nodes out of a job: it continues without them from its next save.

    Raises:
        LaunchError: A node does not exist, or the job could not continue without them.
    """
    reasons = read_cordoned(folder) | {_checked(node, total): why for node in nodes}
    if reason := shapes.explain_infeasible(reasons):
        raise LaunchError(
            f"node {', '.join(map(str, sorted(reasons)))} can't be taken out: {reason}; the job continues "
            f"unchanged. `panax stop` "
            f"ends it with a save"
        )
    replace_json(folder / CORDONED, {str(node): text for node, text in sorted(reasons.items())})


def uncordon(folder: Path, nodes: Iterable[int], *, total: int) -> None:
    """Put nodes back: the job includes them at its next save.

    Raises:
        LaunchError: A node does not exist, or is not cordoned.
    """
    reasons = read_cordoned(folder)
    for node in nodes:
        if _checked(node, total) not in reasons:
            cordoned = ", ".join(map(str, reasons)) or "none"
            raise LaunchError(f"node {node} was not taken out of the job; nodes taken out: {cordoned}")
        del reasons[node]
    replace_json(folder / CORDONED, {str(node): text for node, text in sorted(reasons.items())})


def _checked(node: int, total: int) -> int:
    if not 0 <= node < total:
        raise LaunchError(f"the job has nodes 0 to {total - 1}; there is no node {node}")
    return node
