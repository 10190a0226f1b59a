"""What a traced step sends: every collective of its program, over which mesh axes, how many bytes, how often.

As everywhere in this room, a collective over n devices is counted as a ring sends it: gathering or scattering an array of B
bytes, or exchanging all parts of it, sends B·(n-1)/n from each device; an all-reduce twice that; a permutation B.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from ...core.jax_primitives import collective_axes
from ...core.layout.declarations import find_comm_tag
from ...mesh.rules import MESH_AXES, MeshAxes
from .program import Operation, OperationBlock
from .trip_counts import ExecutionCount, count_executions

_KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
    "ragged_all_to_all": "ragged-all-to-all",
    "pbroadcast": "collective-broadcast",
}
"""Primitives to the names of `collectives.KINDS`."""

_PART = re.compile(r"[\w.*:]+")
_WRAPPERS = frozenset({"transpose", "jvp", "vmap", "checkpoint", "rematted_computation", "remat", "panax_wall"})


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One collective of a step.

    Attributes:
        kind: As in `collectives.KINDS`.
        axes: The mesh axes above size 1 that it goes over, in the mesh's order.
        sent: Bytes that a device sends in one execution.
        times: Executions in one step.
        scope: Where the program named it.
    """

    kind: str
    axes: MeshAxes
    sent: int
    times: ExecutionCount
    scope: str

    @property
    def purpose(self) -> str:
        """What moves, where that was declared, such as `weights`; else the part of the model that sends."""
        parts = [part for part in _PART.findall(self.scope) if part not in _WRAPPERS and not part.startswith("layers.")]
        return find_comm_tag(self.scope) or (parts[-1] if parts else "the step")

    @property
    def wire_bytes(self) -> int:
        """What a device sends in one step, as far as is expected."""
        return round(self.sent * self.times.expected)


def list_traffic(program: OperationBlock, mesh: Mapping[str, int]) -> list[Traffic]:
    """Every collective of a program that leaves its device.

    Args:
        mesh: Mesh axis to size.
    """
    found = []
    for operation, times in count_executions(program):
        kind = _KINDS.get(operation.name)
        axes = () if kind is None else _axes(operation, mesh)
        if kind is not None and axes and (sent := _sent(kind, operation, math.prod(mesh[axis] for axis in axes))):
            found.append(Traffic(kind, axes, sent, times, operation.scope))
    return found


def traffic_totals(traffic: Iterable[Traffic]) -> dict[tuple[str, MeshAxes], int]:
    """Bytes by kind and mesh axes."""
    totals: dict[tuple[str, MeshAxes], int] = {}
    for one in traffic:
        totals[one.kind, one.axes] = totals.get((one.kind, one.axes), 0) + one.wire_bytes
    return totals


def _axes(operation: Operation, mesh: Mapping[str, int]) -> MeshAxes:
    names = collective_axes(operation.eqn)
    return tuple(axis for axis in MESH_AXES if axis in names and mesh.get(axis, 1) > 1)


def _sent(kind: str, operation: Operation, ways: int) -> int:
    given = sum(value.bytes for value in operation.arrays)
    taken = sum(value.bytes for value in operation.outputs)
    if kind == "collective-permute":
        return taken
    if kind == "ragged-all-to-all":
        # Operand and result; then offsets and sizes. What is sent at equal loads fills the smaller one.
        return min(operation.arrays[0].bytes, operation.outputs[0].bytes) * (ways - 1) // ways
    whole = taken if kind == "all-gather" else given
    return (2 if kind == "all-reduce" else 1) * whole * (ways - 1) // ways
