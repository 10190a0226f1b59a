"""`--mesh auto`: a mesh, micro-batches and a rematerialization policy, chosen from the analysis of traced
steps.

The choice among the traced layouts that are legal, fit, and send at most 1.15 times the fewest bytes is the
one that loses the least time to pipeline bubbles and recomputation. Every layout has a lower bound on its
communication: the bytes of its weights, which follow from their axes alone, and the bytes that a traced
layout sends over the same axes for activations. The layout with the lowest bound is traced next, until no
bound promises an improvement. Not all layouts are candidates:

- `context` stays 1 unless nothing fits without it: splitting rows sends more than splitting the batch.
- `tensor` and `context`, or `tensor` and `expert`, together stay within the fast network: they communicate in
every layer, and little of it can be hidden. Only if nothing else fits may `expert` exceed it. An axis that no
computation uses stays 1.
- Stages wait for at most a fifth of a step: they get at least four micro-batches each.

Bytes are not times: the analysis does not know which of them are hidden by matrix multiplications. The memory
check has a margin.
"""

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ...core import Axes, Task, pair_axes
from ...core.errors import LayoutError
from ...core.layout.target import device_target
from ...mesh import MeshShape, Placement, Rules
from ...mesh.legality import MeshRequirements, enumerate_meshes, find_problem, fit_rules
from ...mesh.rules import MESH_AXES, assign, divisors, zero_stage
from ...mesh.topology import data_parallel_size
from ...train import CompiledStep, Program
from ...train.compilation.mesh_requirements import mesh_requirements
from ..walk.walk import StepCost, walk_step

Sizes = Mapping[str, int]

MEMORY_MARGIN = 1.15
"""Factor on the estimated bytes of a layout that must fit."""

MAX_BUBBLE = 0.2
"""Maximum share of a step in which a stage may wait."""

TRAFFIC_SLACK = 1.15
"""Maximum number of bytes sent, relative to the minimum, for a layout that loses less time otherwise."""

MAX_WALKS = 32
"""Maximum number of steps to trace for one choice."""

REMAT_FACTORS = {"none": 1.0, "products": 1.05, "full": 4 / 3}
"""Work of a step by policy: a backward pass is two forward passes, `full` computes one more."""

FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class LayoutChoice:
    """A layout, with the estimates that it was chosen by.

    Attributes:
        remat: The rematerialization policy; None if the task has no choice of policies.
        wire_bytes: Bytes that each device sends in a step.
        memory_bytes: Memory of a step on each device, without the margin.
        num_walks: Number of layouts that were traced.
    """

    mesh: MeshShape
    micro_batches: int
    remat: str | None
    wire_bytes: int
    memory_bytes: int
    num_walks: int = 0

    @property
    def time(self) -> float:
        """Return the relative time of a step without communication; the minimum is 1."""
        return REMAT_FACTORS.get(self.remat or "none", 1.0) / (1.0 - bubble_share(self.mesh.stage, self.micro_batches))

    def __str__(self) -> str:
        sizes = "·".join(f"{axis}={n}" for axis in MESH_AXES if (n := getattr(self.mesh, axis)) > 1) or "one device"
        remat = "" if self.remat is None else f", remat {self.remat}"
        return (
            f"{sizes}, {self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}{remat}: each device "
            f"sends {self.wire_bytes / 1e9:.1f} GB a step and needs about {self.memory_bytes / 2**30:.1f} GiB"
        )


@dataclasses.dataclass(frozen=True)
class DeviceGroup:
    """Devices to run on, with their limits on a mesh.

    Attributes:
        devices: The devices; those of a target that is not attached are sufficient.
        memory_bytes: Memory of each device.
        fast_domain: Number of devices joined by the fast network.
    """

    devices: Sequence[Any]
    memory_bytes: int
    fast_domain: int = 8

    @classmethod
    def of(
        cls, devices: Sequence[Any] | None = None, memory_bytes: int | None = None, fast_domain: int | None = None
    ) -> "DeviceGroup":
        """Return devices with their limits, by default as they report them.

        Args:
            devices: By default all attached devices.
            memory_bytes: Memory of each device, if the devices can't report it.
            fast_domain: Number of devices joined by the fast network; by default from the target's traits.
        """
        devices = jax.devices() if devices is None else list(devices)
        memory = _device_memory(devices) if memory_bytes is None else memory_bytes
        return cls(devices, memory, fast_domain or device_target(devices[0]).traits.fast_domain or len(devices))


def _device_memory(devices: Sequence[Any]) -> int:
    """Return the memory of each device, in bytes; simulated devices share the host's."""
    if device_target(devices[0]).traits.own_memory:
        limit = (devices[0].memory_stats() or {}).get("bytes_limit")
        if limit:
            return limit
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)


def choose_mesh(
    program_of: Callable[[Task, int], Program],
    task: Task,
    group: DeviceGroup,
    batch: Mapping[str, Any],
    batch_axes: Mapping[str, Axes],
    rules: Rules | None = None,
) -> LayoutChoice:
    """Choose a legal layout that fits and sends little.

    Args:
        program_of: (task, micro-batches) to the program of a step.
        batch: The shapes of a global batch.

    Raises:
        LayoutError: Nothing fits, or XLA partitions the task's program, so its communication is unknown
            before compilation.
    """
    if not task.names_axes:
        raise LayoutError(
            f"mesh.auto reads a step's communication from its trace, and {type(task).__name__} leaves that to XLA; "
            "set the mesh's "
            f"sizes, for example mesh.fsdp=-1, and look at them with `panax inspect`, which compiles the step"
        )
    search = _Search(program_of, task, group, batch, batch_axes, rules or Rules())
    for beside in ("nothing", "experts", "wide experts", "context"):
        choice = search.best([mesh for mesh in search.legal if search.kind(mesh) == beside])
        if choice is not None:
            return choice
    rows = next(iter(batch.values())).shape[0]
    count = len(group.devices)
    raise LayoutError(
        f"no layout of {count} device{'s' if count > 1 else ''} with {group.memory_bytes / 2**30:.0f} GiB each holds a "
        f"step of {rows} rows; use more devices, smaller batches, or shorter rows"
    )


class _Search:
    def __init__(
        self,
        program_of: Callable[[Task, int], Program],
        task: Task,
        group: DeviceGroup,
        batch: Mapping[str, Any],
        batch_axes: Mapping[str, Axes],
        rules: Rules,
    ):
        self.program_of, self.task, self.group, self.rules = program_of, task, group, rules
        self.batch, self.batch_axes = batch, task.leaf_axes(batch_axes)
        self.program = program_of(task, 1)
        self.programs: dict[tuple[str | None, int], Program] = {}
        leaves = tuple((f"batch leaf {name!r}", self.batch_axes[name], leaf.shape) for name, leaf in batch.items())
        self.needs: MeshRequirements = dataclasses.replace(mesh_requirements(self.program), batch=leaves)
        self.rows = next(iter(batch.values())).shape[0]
        self.computed = {
            axis for _, axes, _ in self.needs.arrays for name in axes for axis in self.rules.compute.get(name or "", ())
        }
        self.legal = [mesh for mesh in enumerate_meshes(len(group.devices)) if self._is_candidate(mesh)]
        self.walked = 0
        # Bytes over an axis for activations, for each index along it except the first.
        self.rates: dict[str, float] = {}

    def _is_candidate(self, mesh: Sizes) -> bool:
        useful = all(mesh[axis] == 1 or axis in self.computed for axis in ("expert", "tensor", "stage"))
        return useful and find_problem(self.needs, self.rules, mesh) is None and bool(self.counts(mesh))

    def kind(self, mesh: Sizes) -> str | None:
        """Return which axes share the fast network with `tensor`; None if `tensor` would exceed it."""
        expert, context, tensor = mesh["expert"], mesh["context"], mesh["tensor"]
        if context > 1:
            return "context" if expert == 1 and tensor * context <= self.group.fast_domain else None
        if expert > self.group.fast_domain and tensor <= self.group.fast_domain:
            return "wide experts"
        if tensor * expert > self.group.fast_domain:
            return None
        return "nothing" if "expert" not in self.computed else "experts"

    def counts(self, mesh: Sizes) -> list[int]:
        """Return the possible numbers of micro-batches, ascending."""
        each, rest = divmod(self.rows, data_parallel_size(mesh))
        if rest or not each:
            return []
        return [count for count in divisors(each) if bubble_share(mesh["stage"], count) <= MAX_BUBBLE]

    def best(self, candidates: list[dict[str, int]]) -> LayoutChoice | None:
        """Return the best of these layouts; None if none fits."""
        waiting = {
            tuple(mesh.values()): mesh
            for mesh in candidates
            if self.state_bytes(mesh) * MEMORY_MARGIN < self.group.memory_bytes
        }
        choices: list[LayoutChoice] = []
        while waiting and self.walked < MAX_WALKS:
            key = min(waiting, key=lambda key: self.floor(waiting[key]))
            fewest_bytes = min((choice.wire_bytes for choice in choices), default=math.inf)
            if self.floor(waiting[key]) > TRAFFIC_SLACK * fewest_bytes:
                break
            choices += self.try_policies(waiting.pop(key))
        if not choices:
            return None
        fewest_bytes = min(choice.wire_bytes for choice in choices)
        near = [choice for choice in choices if choice.wire_bytes <= TRAFFIC_SLACK * fewest_bytes]
        best = min(near, key=lambda choice: (choice.time, choice.wire_bytes, choice.micro_batches))
        return dataclasses.replace(best, num_walks=self.walked)

    def try_policies(self, mesh: dict[str, int]) -> list[LayoutChoice]:
        """Return, for each rematerialization policy worth trying, the layout that fits with the fewest
        micro-batches."""
        choices, policies = [], self.task.remat_policies or (None,)
        for remat in (policies[0], *reversed(policies[1:])):
            choice = self.fitting(mesh, remat)
            if choice is not None:
                choices.append(choice)
            first = remat == policies[0]
            enough = choice is not None and choice.micro_batches == self.counts(mesh)[0]
            # The policy that stores everything fits without more micro-batches; or the one that stores least
            # does not fit at all.
            if (first and enough) or (not first and choice is None):
                break
        return choices

    def fitting(self, mesh: dict[str, int], remat: str | None) -> LayoutChoice | None:
        counts = self.counts(mesh)
        place = 0
        while place < len(counts) and self.walked < MAX_WALKS:
            cost = self.walk(mesh, counts[place], remat)
            if cost.memory * MEMORY_MARGIN <= self.group.memory_bytes:
                return LayoutChoice(to_mesh_shape(mesh), counts[place], remat, _wire_bytes(cost), cost.memory)
            # As many more micro-batches as needed if all temporaries were activations.
            over = cost.temporaries / max(self.group.memory_bytes / MEMORY_MARGIN - cost.arguments, 1)
            min_count = counts[place] * max(over, 1.0)
            place = max(place + 1, next((i for i, count in enumerate(counts) if count >= min_count), len(counts) - 1))
        return None

    def walk(self, mesh: dict[str, int], count: int, remat: str | None) -> StepCost:
        self.walked += 1
        if (remat, count) not in self.programs:
            task = self.task if remat is None else self.task.rematerialize(remat)
            self.programs[remat, count] = self.program_of(task, count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            placement = Placement.create(to_mesh_shape(mesh), self.rules, self.group.devices)
        cost = walk_step(CompiledStep(self.programs[remat, count], placement, self.batch_axes), dict(self.batch))
        activations = max(_wire_bytes(cost) - self.weight_bytes(mesh, count), 0)
        for axis in ("tensor", "expert", "context", "stage"):
            if mesh[axis] > 1:
                sent = sum(one.wire_bytes for one in cost.traffic if axis in one.axes and "fsdp" not in one.axes)
                rate = min(sent, activations) / (mesh[axis] - 1)
                self.rates[axis] = min(self.rates.get(axis, math.inf), rate)
        return cost

    def floor(self, mesh: Sizes) -> float:
        """Estimate a lower bound of the bytes that a device sends in a step."""
        beside = sum((mesh[axis] - 1) * rate for axis, rate in self.rates.items())
        return self.weight_bytes(mesh, self.counts(mesh)[0]) + 0.8 * beside

    def state_bytes(self, mesh: Sizes) -> int:
        """Return the bytes of a device's part of the state."""
        return state_bytes(self.program, fit_rules(self.rules, self.needs, mesh), mesh)

    def weight_bytes(self, mesh: Sizes, count: int) -> float:
        """Return the bytes that a device sends for weights and their gradients, from their axes alone;
        scattered gradients in float32."""
        rules, total = fit_rules(self.rules, self.needs, mesh), 0.0
        per_step = zero_stage(self.rules, mesh).scatters_per_step
        turns = 1 if per_step else count
        width = self.task.weight_dtype.itemsize
        for name, leaf, axes in pair_axes(self.program.abstract.params, self.program.axes.params):
            stored = {axis for dim in assign(axes, leaf.shape, rules.storage, mesh, name) for axis in dim}
            # Layers that do not divide into equal stages are still divided over all of them.
            used = {axis for dim in assign(axes, None, rules.compute, mesh, name) for axis in dim}
            size = math.prod(leaf.shape) / math.prod(mesh[axis] for axis in used)
            gathered = math.prod(mesh[axis] for axis in stored - used)
            rest = math.prod(mesh.values()) // math.prod(mesh[axis] for axis in stored)
            total += turns * size * (1 - 1 / gathered) * ((1 if per_step else 2) * width + FLOAT32)
            total += 2 * FLOAT32 * math.prod(leaf.shape) / math.prod(mesh[axis] for axis in stored) * (1 - 1 / rest)
        return total


def state_bytes(program: Program, rules: Rules, mesh: Sizes) -> int:
    """Return the bytes of a device's part of the state on a mesh.

    Args:
        rules: Sharding rules fitted to the model on that mesh.
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
    """Return the share of a 1F1B step in which a stage waits.

    >>> bubble_share(4, 12)
    0.2
    """
    return (stages - 1) / (micro_batches + stages - 1)
