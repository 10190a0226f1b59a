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
        parts = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return sizes + parts + (", rows filled up" if self.pad_rows else "")

    @classmethod
    def from_json(cls, found: Any) -> "JobLayout":
        """Read a layout from the content that process 0 has written.

        Raises:
            ValueError: The content is invalid.
        """
        mesh, parts = found["mesh"], found["micro_batches"]
        sizes = {axis: mesh[axis] for axis in MESH_AXES}
        if not all(type(number) is int and number > 0 for number in (*sizes.values(), parts)):
            raise ValueError("expected sizes of at least 1")
        return cls(sizes, parts, bool(found.get("pad_rows")))


@dataclasses.dataclass(frozen=True)
class JobShape:
    """Nodes and layout of one attempt.

    Attributes:
        nodes: Their numbers; the job's process 0 is on the first node.
        layout: Layout; None: as the job was launched.
    """

    nodes: tuple[int, ...]
    layout: JobLayout | None = None

    def describe(self, total: int) -> str:
        """Format it for users."""
        said = f"{len(self.nodes)} of {total} nodes"
        return said if self.layout is None else f"{said}: {self.layout}"


class JobShapes:
    """Sets of nodes and layouts that a job may run on, best first.

    Args:
        place: Folder of the job's files.
        nodes, processes: Number of all nodes and processes of the job.
        min_nodes: Minimum number of remaining nodes.
    """

    def __init__(self, place: Path, *, nodes: int, processes: int, min_nodes: int):
        self._place, self._nodes, self._processes = place, nodes, processes
        self._min_nodes = max(min_nodes, 1)
        self._refused: list[JobLayout] = []

    @classmethod
    def of(cls, job: Job) -> "JobShapes":
        """Create the worlds of a job that is launched here."""
        return cls(job.place, nodes=job.nodes, processes=job.processes, min_nodes=job.policy.min_nodes)

    @classmethod
    def from_folder(cls, place: Path) -> "JobShapes":
        """Create the worlds of a job from its files.

        Raises:
            LaunchError: Its files can't be read.
        """
        found = read_job_file(place / JOB)
        try:
            nodes, processes = int(found["nodes"]), int(found["processes"])
            return cls(place, nodes=nodes, processes=processes, min_nodes=int(found["policy"]["min_nodes"]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise LaunchError(f"{place / JOB} does not describe a job: {error!r}; `panax launch` writes it") from error

    def reject(self, layout: JobLayout) -> None:
        """Exclude a layout that the model can't use after all: the next best one is used."""
        self._refused.append(layout)

    def best(self, here: Collection[int]) -> JobShape | None:
        """Return the largest set of these nodes with a layout of the model; None if there is none.

        Nodes that were taken out are excluded, unless the job can't continue without them.
        """
        return self.best_without(here, self.cordoned) or (
            self.best_without(here, ()) if self.cordoned & {*here} else None
        )

    def best_without(self, here: Collection[int], out: Collection[int]) -> JobShape | None:
        """Return the largest set of these nodes, without those in `out`, with a layout of the model; None if
        there is none."""
        usable = sorted({*here} - {*out})
        if len(usable) >= self._nodes:
            return JobShape(tuple(usable))
        layouts = self._layouts()
        for count in range(len(usable), self._min_nodes - 1, -1):
            if (layout := layouts.get(count * (self._processes // self._nodes))) is not None:
                return JobShape(tuple(usable[:count]), layout)
        return None

    def explain_infeasible(self, out: Collection[int]) -> str:
        """Return why the job could not continue if all nodes except those were connected; empty if it
        could."""
        left = self._nodes - len({*out})
        if not left:
            return f"all {self._nodes} nodes of the job would be taken out"
        if left < self._min_nodes:
            return f"{left} of {self._nodes} nodes would be left, and the job keeps --min-nodes {self._min_nodes}"
        if self.best_without(range(self._nodes), out) is not None:
            return ""
        if not (self._place / LAYOUTS).is_file():
            return "the job has not yet taken a step on all of its nodes, after which layouts for fewer nodes are known"
        return f"the run can't be laid out on {left} of {self._nodes} nodes"

    @property
    def cordoned(self) -> set[int]:
        """Return the nodes that were taken out."""
        return set(read_cordoned(self._place))

    def _layouts(self) -> dict[int, JobLayout]:
        """Read the best layout for each number of processes; empty before a first start of the whole job, and
        if the file can't be used."""
        try:
            content = json_reader.read(self._place / LAYOUTS)
            if content["processes"] != self._processes:
                return {}
            listed = {int(count): [*map(JobLayout.from_json, ranked)] for count, ranked in content["layouts"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        left = {count: [each for each in ranked if each not in self._refused] for count, ranked in listed.items()}
        return {count: ranked[0] for count, ranked in left.items() if ranked}


def read_cordoned(place: Path) -> dict[int, str]:
    """Return the nodes that were taken out of a job, each with the reason; an invalid file counts as
    empty."""
    try:
        found = json_reader.read(place / CORDONED)
        return {int(node): str(why) for node, why in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def cordon(worlds: JobShapes, place: Path, nodes: Iterable[int], why: str, *, total: int) -> None:
    """Take nodes out of a job: it continues without them from its next save.

    Raises:
        LaunchError: A node does not exist, or the job could not continue without them.
    """
    found = read_cordoned(place) | {_checked(node, total): why for node in nodes}
    if reason := worlds.explain_infeasible(found):
        raise LaunchError(
            f"node {', '.join(map(str, sorted(found)))} can't be taken out: {reason}; the job continues unchanged. `panax stop` "
            f"ends it with a save"
        )
    replace_json(place / CORDONED, {str(node): said for node, said in sorted(found.items())})


def uncordon(place: Path, nodes: Iterable[int], *, total: int) -> None:
    """Put nodes back: the job includes them at its next save.

    Raises:
        LaunchError: A node does not exist, or was not taken out.
    """
    found = read_cordoned(place)
    for node in nodes:
        if _checked(node, total) not in found:
            taken = ", ".join(map(str, found)) or "none"
            raise LaunchError(f"node {node} was not taken out of the job; of its nodes there are out: {taken}")
        del found[node]
    replace_json(place / CORDONED, {str(node): said for node, said in sorted(found.items())})


def _checked(node: int, total: int) -> int:
    if not 0 <= node < total:
        raise LaunchError(f"the job has nodes 0 to {total - 1}; there is no node {node}")
    return node
