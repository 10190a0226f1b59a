"""`--mesh auto`: a mesh for a decoder, chosen by the formulas for bytes on the wire and bytes in memory.

Of the layouts that are legal, fit, and send at most 1.15 times the fewest bytes, the one that loses least time to waiting stages
and to what is computed again. Looked at are not all of them:

- `context` stays 1 unless nothing fits without it: splitting rows sends more than splitting the batch does.
- `tensor` and `context`, or `tensor` and `expert`, together stay within the fast network: they communicate in every layer, and
  little hides it. Only where nothing else fits does `expert` leave it. Without a mixture of experts it stays 1.
- Stages wait for at most a fifth of a step: they get at least four micro-batches each.
- A mesh without stages gets the fewest micro-batches that fit: with each of them all weights are gathered again.

Bytes are no times: nothing here knows which of them hide behind products. What fits is decided with a margin for what the
formulas leave out.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal

from ..core.errors import LayoutError
from ..mesh.rules import MESH_AXES, Rules, divisors
from ..mesh.topology import MeshShape, data_parallel_size
from ..models import DecoderConfig, DecoderTask
from ..parallel import RematPolicy
from .communication import decoder_traffic
from .decoder_step import DecoderStep
from .memory import step_memory

MARGIN = 1.15
"""A layout fits if so many times its estimated bytes do: the estimates were up to 13 % too low."""

BUBBLE = 0.2
"""The largest share of a step in which a stage may wait."""

SLACK = 1.15
"""How many times the fewest bytes a layout may send that loses less time otherwise."""

MANY = 16
"""Micro-batches for each stage of which more are of no use but to save memory."""

AGAIN = {"none": 1.0, "products": 1.05, "full": 4 / 3}
"""The work of a step by policy: a backward pass is two forward ones, `full` computes one more."""

Besides = Literal["nothing", "context", "experts", "wide experts"]

REMAT: tuple[RematPolicy, ...] = ("none", "products", "full")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A layout, with what it was chosen by.

    Attributes:
        wire_bytes: What each device sends in a step.
        memory_bytes: What a step takes on each device, without the margin.
    """

    mesh: MeshShape
    micro_batches: int
    remat: RematPolicy
    wire_bytes: int
    memory_bytes: int

    @property
    def time(self) -> float:
        """Of a step, were communication free; the least possible is 1."""
        return AGAIN[self.remat] / (1.0 - bubble(self.mesh.stage, self.micro_batches))

    def __str__(self) -> str:
        sizes = "·".join(f"{axis}={n}" for axis in MESH_AXES if (n := getattr(self.mesh, axis)) > 1) or "one device"
        return (
            f"{sizes}, {self.micro_batches} micro-batch{'es' if self.micro_batches > 1 else ''}, remat {self.remat}: each device "
            f"sends {self.wire_bytes / 1e9:.1f} GB a step and needs about {self.memory_bytes / 2**30:.1f} GiB"
        )


def choose_mesh(
    model: DecoderConfig | DecoderTask,
    devices: int,
    *,
    rows: int,
    length: int,
    memory_bytes: int,
    fast_domain: int = 8,
    packed: bool = True,
    rules: Rules | None = None,
) -> Choice:
    """A legal layout that fits and sends little.

    Args:
        model: A decoder, computed with in bfloat16, or a task with its own settings; its `remat` is not looked at.
        rows: Of the global batch.
        memory_bytes: Of each device.
        fast_domain: Devices that the fast network joins.

    Raises:
        LayoutError: Nothing fits; the message says how many devices would do.

    >>> choose_mesh(DecoderConfig(vocab_size=512), 8, rows=64, length=1024, memory_bytes=2**34).mesh.replica
    8
    """
    task = model if isinstance(model, DecoderTask) else DecoderTask(model=model, compute_dtype="bfloat16")
    search = _Search(task, rows, length, memory_bytes, fast_domain, packed, rules or Rules())
    for besides in search.besides:
        found = [choice for mesh in search.meshes(devices, besides) for choice in search.choices(mesh)]
        if found:
            least = min(choice.wire_bytes for choice in found)
            near = [choice for choice in found if choice.wire_bytes <= SLACK * least]
            return min(near, key=lambda choice: (choice.time, choice.wire_bytes, choice.micro_batches))
    more = (devices * 2**k for k in range(1, 13))
    enough = next((n for n in more if search.fits_on(n)), None)
    advice = f"{enough} would do" if enough else "shorten the rows, or use smaller batches"
    raise LayoutError(
        f"no layout of {devices} device{'s' if devices > 1 else ''} with {memory_bytes / 2**30:.0f} GiB each holds a step of "
        f"{rows} rows of {length} tokens; {advice}"
    )


@dataclasses.dataclass(frozen=True)
class _Search:
    task: DecoderTask
    rows: int
    length: int
    memory_bytes: int
    fast_domain: int
    packed: bool
    rules: Rules

    @property
    def besides(self) -> tuple[Besides, ...]:
        """What `tensor` may share the fast network with, in the order in which it is tried."""
        moe = self.task.model.feed_forward
        return ("nothing", "context") if moe is None else ("experts", "wide experts", "context")

    def meshes(self, devices: int, besides: Besides) -> Iterator[dict[str, int]]:
        """Those worth running."""
        for other in self._others(devices, besides):
            for tensor in divisors(devices // other):
                if (tensor if besides == "wide experts" else tensor * other) > self.fast_domain:
                    break
                for stage, replica in itertools.product(divisors(devices // (other * tensor)), repeat=2):
                    fsdp, rest = divmod(devices, other * tensor * stage * replica)
                    if not rest and fsdp:
                        sizes = {"replica": replica, "stage": stage, "fsdp": fsdp, "tensor": tensor}
                        yield {**sizes, "context" if besides == "context" else "expert": other}

    def _others(self, devices: int, besides: Besides) -> list[int]:
        """The sizes of the axis that is besides `tensor`."""
        if besides == "nothing":
            return [1]
        if besides == "context":
            return [n for n in divisors(devices) if 1 < n <= self.fast_domain]
        moe = self.task.model.feed_forward
        assert moe is not None
        wide = besides == "wide experts"
        return [n for n in divisors(devices) if moe.experts % n == 0 and (n > self.fast_domain) == wide]

    def choices(self, mesh: dict[str, int]) -> Iterator[Choice]:
        """For each policy, what fits; without stages, with the fewest micro-batches only."""
        for remat in REMAT:
            for count in self.micro_batches(mesh):
                choice = self.tried(mesh, count, remat)
                if choice is not None:
                    yield choice
                    if mesh["stage"] == 1:
                        break

    def micro_batches(self, mesh: dict[str, int]) -> list[int]:
        """The numbers of micro-batches to try, ascending."""
        each, rest = divmod(self.rows, data_parallel_size(mesh))
        if rest or not each:
            return []
        stages = mesh.get("stage", 1)
        enough = [count for count in divisors(each) if bubble(stages, count) <= BUBBLE]
        # Beyond this waiting is next to nothing; but the most parts take the least memory.
        return [count for count in enough if stages == 1 or count <= MANY * stages or count == enough[-1]]

    def tried(self, mesh: dict[str, int], count: int, remat: RematPolicy) -> Choice | None:
        """None if it is not legal or does not fit."""
        try:
            step = self.step(mesh, count, remat)
            memory = step_memory(step).total
            if memory * MARGIN > self.memory_bytes:
                return None
            sent = sum(traffic.wire_bytes for traffic in decoder_traffic(step))
        except ValueError:
            return None
        return Choice(as_shape(mesh), count, remat, sent, memory)

    def step(self, mesh: dict[str, int], count: int, remat: RematPolicy) -> DecoderStep:
        return DecoderStep(
            task=dataclasses.replace(self.task, remat=remat),
            mesh=mesh,
            rows=self.rows,
            length=self.length,
            micro_batches=count,
            packed=self.packed,
            rules=self.rules,
        )

    def fits_on(self, devices: int) -> bool:
        """Whether any layout does, tried with what takes least memory."""
        meshes = itertools.chain.from_iterable(self.meshes(devices, besides) for besides in self.besides)
        return any(
            self.tried(mesh, counts[-1], "full") is not None for mesh in meshes if (counts := self.micro_batches(mesh))
        )


def as_shape(mesh: dict[str, int]) -> MeshShape:
    replica, stage, fsdp, expert, context, tensor = (mesh.get(axis, 1) for axis in MESH_AXES)
    return MeshShape(replica=replica, stage=stage, fsdp=fsdp, expert=expert, context=context, tensor=tensor)


def bubble(stages: int, micro_batches: int) -> float:
    """The share of a 1F1B step in which a stage waits.

    >>> bubble(4, 12)
    0.2
    """
    return (stages - 1) / (micro_batches + stages - 1)
