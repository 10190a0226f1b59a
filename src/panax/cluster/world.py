"""The nodes that a job runs on at one time, and the layout of the model on them: all of its nodes, or those that are left.

Process 0 writes the layouts for every smaller count of processes when the whole job has begun; so whoever supervises reads a file
and holds no jax. A person, or a policy, takes a node out of the job by writing its number beside it.
"""

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import LaunchError
from .job import Job, written

LAYOUTS, CORDONED = "layouts.json", "cordoned.json"

MESH_AXES = ("replica", "stage", "fsdp", "expert", "context", "tensor")
"""The only names of which a layout may consist."""


@dataclasses.dataclass(frozen=True)
class Layout:
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
    def read(cls, found: Any) -> "Layout":
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
class World:
    """Where one attempt runs.

    Attributes:
        nodes: Their numbers; the first one's first process is the job's process 0.
        layout: None: as the job was launched.
    """

    nodes: tuple[int, ...]
    layout: Layout | None = None

    def shown(self, total: int) -> str:
        """For a person."""
        said = f"{len(self.nodes)} of {total} nodes"
        return said if self.layout is None else f"{said}: {self.layout}"


class Worlds:
    """The worlds that a job may run in, best first.

    Args:
        job: Its policy says how few nodes may be left.
    """

    def __init__(self, job: Job):
        self._job = job
        self._refused: list[Layout] = []

    def refuse(self, layout: Layout) -> None:
        """Count a layout as one that the model can't be laid out on after all: the next best one is taken."""
        self._refused.append(layout)

    def best(self, here: Collection[int]) -> World | None:
        """The largest world of these nodes that the model can be laid out on; None where there is none."""
        usable = sorted(set(here) - self.cordoned)
        if len(usable) >= self._job.nodes:
            return World(tuple(usable))
        layouts = self._layouts()
        for count in range(len(usable), max(self._job.policy.min_nodes, 1) - 1, -1):
            if (layout := layouts.get(count * self._job.processes_per_node)) is not None:
                return World(tuple(usable[:count]), layout)
        return None

    @property
    def cordoned(self) -> set[int]:
        """The nodes that were taken out."""
        return set(cordoned(self._job.place))

    def _layouts(self) -> dict[int, Layout]:
        """Processes to the best layout; empty before a first start of the whole job, and where the file can't be used."""
        try:
            found = json.loads((self._job.place / LAYOUTS).read_text(encoding="utf-8"))
            if found["processes"] != self._job.processes:
                return {}
            listed = {int(count): [*map(Layout.read, ranked)] for count, ranked in found["layouts"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        left = {count: [each for each in ranked if each not in self._refused] for count, ranked in listed.items()}
        return {count: ranked[0] for count, ranked in left.items() if ranked}


def cordoned(place: Path) -> dict[int, str]:
    """Node to why it was taken out of a job; a file that is none says nothing."""
    try:
        found = json.loads((place / CORDONED).read_text(encoding="utf-8"))
        return {int(node): str(why) for node, why in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def cordon(place: Path, nodes: Iterable[int], why: str, *, total: int) -> None:
    """Take nodes out of a job: it goes on without them from its next save.

    Raises:
        LaunchError: There is no such node, or none would be left.
    """
    found = cordoned(place) | {_checked(node, total): why for node in nodes}
    if len(found) >= total:
        raise LaunchError(f"all {total} nodes of the job would be taken out; leave one, or end the job: panax stop")
    written(place / CORDONED, {str(node): said for node, said in sorted(found.items())})


def uncordon(place: Path, nodes: Iterable[int], *, total: int) -> None:
    """Put nodes back: the job takes them in at its next save.

    Raises:
        LaunchError: There is no such node, or it was not taken out.
    """
    found = cordoned(place)
    for node in nodes:
        if _checked(node, total) not in found:
            taken = ", ".join(map(str, found)) or "none"
            raise LaunchError(f"node {node} was not taken out of the job; of its nodes there are out: {taken}")
        del found[node]
    written(place / CORDONED, {str(node): said for node, said in sorted(found.items())})


def _checked(node: int, total: int) -> int:
    if not 0 <= node < total:
        raise LaunchError(f"the job has nodes 0 to {total - 1}; there is no node {node}")
    return node
