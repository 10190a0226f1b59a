"""`--mesh auto`: a mesh, micro-batches and a rematerialisation policy, chosen by walking through traced steps.

Of the layouts that were walked, are legal and fit, and send at most 1.15 times the fewest bytes, the one that loses least time
to waiting stages and to what is computed again. Every layout has a floor: what its weights send, which follows from their axes
alone, and what a layout that was walked sends over the same axes for activations. The one with the lowest floor is walked next,
until no floor promises better. Not all layouts are candidates:

- `context` stays 1 unless nothing fits without it: splitting rows sends more than splitting the batch does.
- `tensor` and `context`, or `tensor` and `expert`, together stay within the fast network: they communicate in every layer, and
  little hides it. Only where nothing else fits does `expert` leave it. An axis by which nothing is computed stays 1.
- Stages wait for at most a fifth of a step: they get at least four micro-batches each.

Bytes are not times: nothing here knows which of them hide behind matrix multiplications. What fits is decided with a margin.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...core import Axes, Task, pair_axes
from ...core.errors import LayoutError
from ...mesh import MeshShape, Placement, Rules
from ...mesh.legality import MeshRequirements, enumerate_meshes, find_problem, fit_rules
from ...mesh.rules import MESH_AXES, assign, divisors
from ...mesh.topology import data_parallel_size
from ...train import CompiledStep, Program
from ...train.compiled import mesh_requirements
from ..walk.walk import StepCost, walk_step

Sizes = Mapping[str, int]

MEMORY_MARGIN = 1.15
"""A layout fits if so many times its estimated bytes do."""

MAX_BUBBLE = 0.2
"""The largest share of a step in which a stage may wait."""

TRAFFIC_SLACK = 1.15
"""How many times the fewest bytes a layout may send that loses less time otherwise."""

MAX_WALKS = 32
"""The most steps that are traced for one choice."""

REMAT_FACTORS = {"none": 1.0, "products": 1.05, "full": 4 / 3}
"""The work of a step by policy: a backward pass is two forward ones, `full` computes one more."""

FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class LayoutChoice:
    """A layout, with what it was chosen by.

    Attributes:
        remat: The policy; None where the task has no choice of it.
        wire_bytes: What each device sends in a step.
        memory_bytes: What a step takes on each device, without the margin.
        walked: How many layouts were looked at.
    """

    mesh: MeshShape
    micro_batches: int
    remat: str | None
    wire_bytes: int
    memory_bytes: int
    num_walks: int = 0

    @property
    def time(self) -> float:
        """Of a step, were communication free; the least possible is 1."""
        return REMAT_FACTORS.get(self.remat or "none", 1.0) / (1.0 - bubble_share(self.mesh.stage, self.micro_batches))

    def __str__(self) -> str:
        sizes = "·".join(f"{axis}={n}" for axis in MESH_AXES if (n := getattr(self.mesh, axis)) > 1) or "one device"
        remat = "" if self.remat is None else f", remat {self.remat}"
        return (
            f"{sizes}, {self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}{remat}: each device "
            f"sends {self.wire_bytes / 1e9:.1f} GB a step and needs about {self.memory_bytes / 2**30:.1f} GiB"
        )


def choose_mesh(
    program_of: Callable[[Task, int], Program],
    task: Task,
    devices: Sequence[Any],
    batch: Mapping[str, Any],
    batch_axes: Mapping[str, Axes],
    *,
    memory_bytes: int,
    fast_domain: int = 8,
    rules: Rules | None = None,
) -> LayoutChoice:
    """A legal layout that fits and sends little.

    Args:
        program_of: (task, micro-batches) to the program of a step.
        devices: To run on; those of a target that is not attached will do.
        batch: The shapes of a global batch.
        memory_bytes: Of each device.
        fast_domain: Devices that the fast network joins.

    Raises:
        LayoutError: Nothing fits, or XLA partitions the task's program, which says nothing before it is compiled.
    """
    if not task.names_axes:
        raise LayoutError(
            f"mesh.auto reads what a step sends from its trace, and {type(task).__name__} leaves that to XLA; set the mesh's "
            f"sizes, for example mesh.fsdp=-1, and look at them with `panax inspect`, which compiles the step"
        )
    search = _Search(program_of, task, devices, batch, batch_axes, memory_bytes, fast_domain, rules or Rules())
    for beside in ("nothing", "experts", "wide experts", "context"):
        found = search.best([mesh for mesh in search.legal if search.kind(mesh) == beside])
        if found is not None:
            return found
    rows = next(iter(batch.values())).shape[0]
    raise LayoutError(
        f"no layout of {len(devices)} device{'s' if len(devices) > 1 else ''} with {memory_bytes / 2**30:.0f} GiB each holds a "
        f"step of {rows} rows; use more devices, smaller batches, or shorter rows"
    )


class _Search:
    def __init__(
        self,
        program_of: Callable[[Task, int], Program],
        task: Task,
        devices: Sequence[Any],
        batch: Mapping[str, Any],
        batch_axes: Mapping[str, Axes],
        memory_bytes: int,
        fast_domain: int,
        rules: Rules,
    ):
        self.program_of, self.task, self.devices = program_of, task, devices
        self.batch, self.batch_axes = batch, task.leaf_axes(batch_axes)
        self.memory_bytes, self.fast_domain, self.rules = memory_bytes, fast_domain, rules
        self.program = program_of(task, 1)
        self.programs: dict[tuple[str | None, int], Program] = {}
        leaves = tuple((f"batch leaf {name!r}", self.batch_axes[name], leaf.shape) for name, leaf in batch.items())
        self.needs: MeshRequirements = dataclasses.replace(mesh_requirements(self.program), batch=leaves)
        self.rows = next(iter(batch.values())).shape[0]
        self.computed = {
            axis for _, axes, _ in self.needs.arrays for name in axes for axis in self.rules.compute.get(name or "", ())
        }
        self.legal = [mesh for mesh in enumerate_meshes(len(devices)) if self._is_candidate(mesh)]
        self.walked = 0
        # Bytes over an axis for activations, for each place along it but the first.
        self.rates: dict[str, float] = {}

    def _is_candidate(self, mesh: Sizes) -> bool:
        useful = all(mesh[axis] == 1 or axis in self.computed for axis in ("expert", "tensor", "stage"))
        return useful and find_problem(self.needs, self.rules, mesh) is None and bool(self.counts(mesh))

    def kind(self, mesh: Sizes) -> str | None:
        """What `tensor` shares the fast network with; None where it would leave it."""
        expert, context, tensor = mesh["expert"], mesh["context"], mesh["tensor"]
        if context > 1:
            return "context" if expert == 1 and tensor * context <= self.fast_domain else None
        if expert > self.fast_domain and tensor <= self.fast_domain:
            return "wide experts"
        if tensor * expert > self.fast_domain:
            return None
        return "nothing" if "expert" not in self.computed else "experts"

    def counts(self, mesh: Sizes) -> list[int]:
        """The numbers of micro-batches that are possible, ascending."""
        each, rest = divmod(self.rows, data_parallel_size(mesh))
        if rest or not each:
            return []
        return [count for count in divisors(each) if bubble_share(mesh["stage"], count) <= MAX_BUBBLE]

    def best(self, candidates: list[dict[str, int]]) -> LayoutChoice | None:
        """Of these the one to take; None where none fits."""
        waiting = {
            tuple(mesh.values()): mesh
            for mesh in candidates
            if self.state_bytes(mesh) * MEMORY_MARGIN < self.memory_bytes
        }
        found: list[LayoutChoice] = []
        while waiting and self.walked < MAX_WALKS:
            key = min(waiting, key=lambda key: self.floor(waiting[key]))
            least = min((choice.wire_bytes for choice in found), default=math.inf)
            if self.floor(waiting[key]) > TRAFFIC_SLACK * least:
                break
            found += self.tried(waiting.pop(key))
        if not found:
            return None
        least = min(choice.wire_bytes for choice in found)
        near = [choice for choice in found if choice.wire_bytes <= TRAFFIC_SLACK * least]
        best = min(near, key=lambda choice: (choice.time, choice.wire_bytes, choice.micro_batches))
        return dataclasses.replace(best, walked=self.walked)

    def tried(self, mesh: dict[str, int]) -> list[LayoutChoice]:
        """For the policies that are needed, what fits with the fewest micro-batches."""
        found, policies = [], self.task.remat_policies or (None,)
        for remat in (policies[0], *reversed(policies[1:])):
            choice = self.fitting(mesh, remat)
            if choice is not None:
                found.append(choice)
            first = remat == policies[0]
            enough = choice is not None and choice.micro_batches == self.counts(mesh)[0]
            # What keeps everything fits at once; or what keeps least does not fit at all.
            if (first and enough) or (not first and choice is None):
                break
        return found

    def fitting(self, mesh: dict[str, int], remat: str | None) -> LayoutChoice | None:
        counts = self.counts(mesh)
        place = 0
        while place < len(counts) and self.walked < MAX_WALKS:
            cost = self.walk(mesh, counts[place], remat)
            if cost.memory * MEMORY_MARGIN <= self.memory_bytes:
                return LayoutChoice(to_mesh_shape(mesh), counts[place], remat, _wire_bytes(cost), cost.memory)
            # As many parts more as would be needed were all temporaries activations.
            over = cost.temporaries / max(self.memory_bytes / MEMORY_MARGIN - cost.arguments, 1)
            wanted = counts[place] * max(over, 1.0)
            place = max(place + 1, next((i for i, count in enumerate(counts) if count >= wanted), len(counts) - 1))
        return None

    def walk(self, mesh: dict[str, int], count: int, remat: str | None) -> StepCost:
        self.walked += 1
        if (remat, count) not in self.programs:
            task = self.task if remat is None else self.task.rematerialize(remat)
            self.programs[remat, count] = self.program_of(task, count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            placement = Placement.create(to_mesh_shape(mesh), self.rules, self.devices)
        cost = walk_step(CompiledStep(self.programs[remat, count], placement, self.batch_axes), dict(self.batch))
        activations = max(_wire_bytes(cost) - self.weight_bytes(mesh, count), 0)
        for axis in ("tensor", "expert", "context", "stage"):
            if mesh[axis] > 1:
                sent = sum(one.wire_bytes for one in cost.traffic if axis in one.axes and "fsdp" not in one.axes)
                rate = min(sent, activations) / (mesh[axis] - 1)
                self.rates[axis] = min(self.rates.get(axis, math.inf), rate)
        return cost

    def floor(self, mesh: Sizes) -> float:
        """At least about what a device sends in a step."""
        beside = sum((mesh[axis] - 1) * rate for axis, rate in self.rates.items())
        return self.weight_bytes(mesh, self.counts(mesh)[0]) + 0.8 * beside

    def state_bytes(self, mesh: Sizes) -> int:
        """Of a device's part of the state."""
        return state_bytes(self.program, fit_rules(self.rules, self.needs, mesh), mesh)

    def weight_bytes(self, mesh: Sizes, count: int) -> float:
        """What a device sends for weights and their gradients, by their axes alone; scattered gradients in float32."""
        rules, total = fit_rules(self.rules, self.needs, mesh), 0.0
        once = self.rules.zero == "1" or (self.rules.zero == "auto" and mesh["stage"] > 1)
        turns = 1 if once else count
        width = self.task.weight_dtype.itemsize
        for name, leaf, axes in pair_axes(self.program.abstract.params, self.program.axes.params):
            stored = {axis for dim in assign(axes, leaf.shape, rules.storage, mesh, name) for axis in dim}
            # Layers that don't fall into equal stages are divided over them all the same.
            used = {axis for dim in assign(axes, None, rules.compute, mesh, name) for axis in dim}
            size = math.prod(leaf.shape) / math.prod(mesh[axis] for axis in used)
            gathered = math.prod(mesh[axis] for axis in stored - used)
            rest = math.prod(mesh.values()) // math.prod(mesh[axis] for axis in stored)
            total += turns * size * (1 - 1 / gathered) * ((1 if once else 2) * width + FLOAT32)
            total += 2 * FLOAT32 * math.prod(leaf.shape) / math.prod(mesh[axis] for axis in stored) * (1 - 1 / rest)
        return total


def state_bytes(program: Program, rules: Rules, mesh: Sizes) -> int:
    """Of a device's part of the state on a mesh.

    Args:
        rules: Fitted to the model on that mesh.
    """
    total = 0
    for name, leaf, axes in pair_axes(program.abstract, program.axes):
        dims = assign(axes, leaf.shape, rules.storage, mesh, name)
        total += math.prod(leaf.shape) * getattr(leaf.dtype, "itemsize", 8) // _ways(dims, mesh)
    return total


def _ways(dims: Sequence[Sequence[str]], mesh: Sizes) -> int:
    return math.prod(mesh[axis] for dim in dims for axis in dim)


def _wire_bytes(cost: StepCost) -> int:
    return sum(one.wire_bytes for one in cost.traffic)


def to_mesh_shape(mesh: Sizes) -> MeshShape:
    replica, stage, fsdp, expert, context, tensor = (mesh.get(axis, 1) for axis in MESH_AXES)
    return MeshShape(replica=replica, stage=stage, fsdp=fsdp, expert=expert, context=context, tensor=tensor)


def bubble_share(stages: int, micro_batches: int) -> float:
    """The share of a 1F1B step in which a stage waits.

    >>> bubble_share(4, 12)
    0.2
    """
    return (stages - 1) / (micro_batches + stages - 1)
