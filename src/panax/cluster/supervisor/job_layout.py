"""The nodes that a job runs on at one time, and the layout of the model on them: all of its nodes, or those that are left.

Process 0 writes the layouts for every smaller count of processes when the whole job has begun; so whoever supervises reads a file
and holds no jax. A person, or a policy, takes a node out of the job by writing its number beside it.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...core.errors import LaunchError
from ...system import json_reader
from ..job import Job, write_json
from .job_folder import CORDONED, JOB, LAYOUTS, read_job_file

MESH_AXES = ("replica", "stage", "fsdp", "expert", "context", "tensor")
"""The only names of which a layout may consist."""


@dataclasses.dataclass(frozen=True)
class JobLayout:
    """How the model lies on a smaller count of processes.

    Attributes:
        mesh: Mesh axis to size; of all axes.
        micro_batches: Parts of the global batch, so that a device holds no more rows at one time than before.
        pad_rows: Whether rows of weight zero fill the batch up.
    """

    mesh: Mapping[str, int]
    micro_batches: int
    pad_rows: bool = False

    @property
    def flags(self) -> list[str]:
        """As `panax train` takes it."""
        mesh = [word for axis in MESH_AXES for word in (f"--mesh.{axis}", str(self.mesh[axis]))]
        rows = ["--step.pad-rows"] if self.pad_rows else []
        return [*mesh, "--step.micro-batches", str(self.micro_batches), *rows]

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis}={self.mesh[axis]}" for axis in MESH_AXES if self.mesh[axis] > 1) or "one device"
        parts = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return sizes + parts + (", rows filled up" if self.pad_rows else "")

    @classmethod
    def from_json(cls, found: Any) -> "JobLayout":
        """From what process 0 has written.

        Raises:
            ValueError: It is something else.
        """
        mesh, parts = found["mesh"], found["micro_batches"]
        sizes = {axis: mesh[axis] for axis in MESH_AXES}
        if not all(type(number) is int and number > 0 for number in (*sizes.values(), parts)):
            raise ValueError("expected sizes of at least 1")
        return cls(sizes, parts, bool(found.get("pad_rows")))


@dataclasses.dataclass(frozen=True)
class JobShape:
    """Where one attempt runs.

    Attributes:
        nodes: Their numbers; the first one's first process is the job's process 0.
        layout: None: as the job was launched.
    """

    nodes: tuple[int, ...]
    layout: JobLayout | None = None

    def describe(self, total: int) -> str:
        """For a person."""
        said = f"{len(self.nodes)} of {total} nodes"
        return said if self.layout is None else f"{said}: {self.layout}"


class JobShapes:
    """The worlds that a job may run in, best first.

    Args:
        place: Of the job's files.
        nodes, processes: All that the job has.
        min_nodes: So few may be left.
    """

    def __init__(self, place: Path, *, nodes: int, processes: int, min_nodes: int):
        self._place, self._nodes, self._processes = place, nodes, processes
        self._min_nodes = max(min_nodes, 1)
        self._refused: list[JobLayout] = []

    @classmethod
    def of(cls, job: Job) -> "JobShapes":
        """Those of a job that is launched here."""
        return cls(job.place, nodes=job.nodes, processes=job.processes, min_nodes=job.policy.min_nodes)

    @classmethod
    def from_folder(cls, place: Path) -> "JobShapes":
        """Those of a job that is followed from elsewhere.

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
        """Count a layout as one that the model can't be laid out on after all: the next best one is taken."""
        self._refused.append(layout)

    def best(self, here: Collection[int]) -> JobShape | None:
        """The largest world of these nodes that the model can be laid out on; None where there is none.

        Nodes that were taken out are left out, unless the job can't go on without them.
        """
        return self.best_without(here, self.cordoned) or (
            self.best_without(here, ()) if self.cordoned & {*here} else None
        )

    def best_without(self, here: Collection[int], out: Collection[int]) -> JobShape | None:
        """The largest world of these nodes and none of those that are out; None where there is none."""
        usable = sorted({*here} - {*out})
        if len(usable) >= self._nodes:
            return JobShape(tuple(usable))
        layouts = self._layouts()
        for count in range(len(usable), self._min_nodes - 1, -1):
            if (layout := layouts.get(count * (self._processes // self._nodes))) is not None:
                return JobShape(tuple(usable[:count]), layout)
        return None

    def explain_infeasible(self, out: Collection[int]) -> str:
        """Why the job could not go on if all nodes were here but those; empty where it could."""
        left = self._nodes - len({*out})
        if not left:
            return f"all {self._nodes} nodes of the job would be taken out"
        if left < self._min_nodes:
            return f"{left} of {self._nodes} nodes would be left, and the job keeps --min-nodes {self._min_nodes}"
        if self.best_without(range(self._nodes), out) is not None:
            return ""
        if not (self._place / LAYOUTS).is_file():
            return "the job has not trained on all of its nodes yet, which is when it learns how it could on fewer"
        return f"the run can't be laid out on {left} of {self._nodes} nodes"

    @property
    def cordoned(self) -> set[int]:
        """The nodes that were taken out."""
        return set(read_cordoned(self._place))

    def _layouts(self) -> dict[int, JobLayout]:
        """Processes to the best layout; empty before a first start of the whole job, and where the file can't be used."""
        try:
            found = json_reader.read(self._place / LAYOUTS)
            if found["processes"] != self._processes:
                return {}
            listed = {int(count): [*map(JobLayout.from_json, ranked)] for count, ranked in found["layouts"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        left = {count: [each for each in ranked if each not in self._refused] for count, ranked in listed.items()}
        return {count: ranked[0] for count, ranked in left.items() if ranked}


def read_cordoned(place: Path) -> dict[int, str]:
    """Node to why it was taken out of a job; a file that is none says nothing."""
    try:
        found = json_reader.read(place / CORDONED)
        return {int(node): str(why) for node, why in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def cordon(worlds: JobShapes, place: Path, nodes: Iterable[int], why: str, *, total: int) -> None:
    """Take nodes out of a job: it goes on without them from its next save.

    Raises:
        LaunchError: There is no such node, or the job could not go on without them.
    """
    found = read_cordoned(place) | {_checked(node, total): why for node in nodes}
    if reason := worlds.explain_infeasible(found):
        raise LaunchError(
            f"node {', '.join(map(str, sorted(found)))} can't be taken out: {reason}; the job continues unchanged. `panax stop` "
            f"ends it with a save"
        )
    write_json(place / CORDONED, {str(node): said for node, said in sorted(found.items())})


def uncordon(place: Path, nodes: Iterable[int], *, total: int) -> None:
    """Put nodes back: the job takes them in at its next save.

    Raises:
        LaunchError: There is no such node, or it was not taken out.
    """
    found = read_cordoned(place)
    for node in nodes:
        if _checked(node, total) not in found:
            taken = ", ".join(map(str, found)) or "none"
            raise LaunchError(f"node {node} was not taken out of the job; of its nodes there are out: {taken}")
        del found[node]
    write_json(place / CORDONED, {str(node): said for node, said in sorted(found.items())})


def _checked(node: int, total: int) -> int:
    if not 0 <= node < total:
        raise LaunchError(f"the job has nodes 0 to {total - 1}; there is no node {node}")
    return node
