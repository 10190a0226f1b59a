"""Overlap of a compiled program's collectives with its matrix multiplications: how far its schedule hides
communication.

The text of a scheduled program has its instructions in the order in which they begin. An asynchronous
collective runs from its start to its done; the matrix multiplications between the two, including those of
loops and fusions, can hide it. A collective written as one instruction overlaps with nothing.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from .collectives import KINDS, Collective, count_collectives
from .hlo import Computation, Frame, HloModule, Instruction, elements

_DIMS = re.compile(r"\[([\d,]*)\]")
_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")


@dataclasses.dataclass(frozen=True)
class OverlapReport:
    """A collective, and the matrix multiplications that overlap with one execution of it.

    Attributes:
        flops: FLOPs of matrix multiplications between its start and its end, on each device.
    """

    collective: Collective
    flops: float

    def hidden_bytes(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Return the bytes of one execution that are sent during matrix multiplications, at these rates.

        >>> sent = Collective("all-reduce", ("replica",), "f32", 8, 100, 1, True, "", "a")
        >>> OverlapReport(sent, 30.0).hidden_bytes(1.0, 2.0), OverlapReport(sent, 80.0).hidden_bytes(1.0, 2.0)
        (60.0, 100.0)
        """
        return min(float(self.collective.wire_bytes), self.flops / flops_per_second * bytes_per_second)


def has_async_schedule(text: str) -> bool:
    """Return True if a program's text shows when collectives start and when they are done; a program for TPUs
    shows chains of fusions, one for CPUs waits for each."""
    return "-start(" in text and "chain_id=" not in text


def overlapped_flops(text: str, mesh_shape: Mapping[str, int]) -> list[OverlapReport]:
    """List every collective of a compiled program, as `count_collectives` does, with the work that overlaps
    with it in the schedule.

    Raises:
        ValueError: As `count_collectives`; or the program is not scheduled.
    """
    if "is_scheduled=true" not in text[: text.find("\n")]:
        raise ValueError("the program is not scheduled: expected what `compiled.as_text()` gives")
    counting = _Counting(HloModule.parse(text))
    beside: dict[str, float] = {}
    for computation in counting.module.computations.values():
        beside |= counting.between(computation)
    return [OverlapReport(one, beside.get(one.name, 0.0)) for one in count_collectives(text, mesh_shape)]


class _Counting:
    """Counter of the FLOPs of a program's matrix multiplications."""

    def __init__(self, module: HloModule):
        self.module = module
        self._of: dict[str, float] = {}

    def between(self, computation: Computation) -> dict[str, float]:
        """Return the FLOPs between each collective's start and its done, by the name of the start."""
        instructions = list(computation.instructions.values())
        ends = {one.operands[0]: place for place, one in enumerate(instructions) if one.opcode.endswith("-done")}
        flops_by_start = {}
        for place, one in enumerate(instructions):
            if one.opcode.endswith("-start") and one.opcode.removesuffix("-start") in KINDS and one.name in ends:
                meanwhile = instructions[place + 1 : ends[one.name]]
                flops_by_start[one.name] = sum((self.of_instruction(other, computation) for other in meanwhile), 0.0)
        return flops_by_start

    def of_instruction(self, one: Instruction, computation: Computation) -> float:
        if one.opcode == "dot":
            return _of_dot(one, computation)
        if one.opcode == "while":
            trips = Frame(self.module, computation).trip_count(one)
            return self.of(one.attribute("body")) * (1 if trips is None else trips)
        if one.opcode.endswith(("-done", "-update")):
            return 0.0
        return sum((self.of(name) for name in one.called), 0.0)

    def of(self, name: str) -> float:
        """Return the FLOPs of one run of a computation."""
        if name not in self._of:
            computation = self.module.computations.get(name)
            # A computation does not call one that calls it.
            self._of[name] = 0.0
            if computation is not None:
                self._of[name] = sum(self.of_instruction(one, computation) for one in computation.instructions.values())
        return self._of[name]


def _of_dot(one: Instruction, computation: Computation) -> float:
    contracted = _CONTRACTED.search(one.attributes)
    left = computation.instructions.get(one.operands[0])
    if contracted is None or left is None:
        return 0.0
    sizes = _sizes(left.shape)
    summed = math.prod(sizes[int(dim)] for dim in contracted.group(1).split(",") if dim)
    return 2.0 * math.prod(_sizes(one.shape)) * summed


def _sizes(shape: str) -> list[int]:
    found = _DIMS.search(elements(shape)[0])
    return [int(size) for size in found.group(1).split(",") if size] if found else []
