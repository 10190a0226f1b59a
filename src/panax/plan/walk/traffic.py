"""Communication of a traced step: every collective of its program, its mesh axes, bytes and number of
executions.

As everywhere in this package, a collective over n devices is counted for a ring: gathering or scattering an
array of B bytes, or exchanging all parts of it, sends B·(n-1)/n from each device; an all-reduce twice that; a
permutation B.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping

from ...compiling.equations import source_line
from ...core.jax_primitives import JaxprEqn, collective_axes
from ...core.layout.declarations import find_comm_tag
from ...mesh.rules import MESH_AXES, MeshAxes
from ..collectives import CollectiveKind, ring_wire_bytes
from .program import Operation, OperationBlock
from .trip_counts import ExecutionCount, count_executions

_KINDS: Mapping[str, CollectiveKind] = {
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
"""Name of a primitive to its kind of collective."""

_PART = re.compile(r"[\w.*:]+")
_WRAPPERS = frozenset({"transpose", "jvp", "vmap", "checkpoint", "rematted_computation", "remat", "panax_wall"})


_GENERAL = ("panax/spmd/", "panax/core/")
"""Where collectives are written for all layers: the line that called is meant."""


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One collective of a step.

    Attributes:
        axes: Its mesh axes of size above 1, in the mesh's order.
        sent: Bytes that a device sends in one execution.
        times: Executions in one step.
        scope: Its named scope in the program.
        equation: The equation of the program that it is; None if it was made otherwise.
    """

    kind: CollectiveKind
    axes: MeshAxes
    sent: int
    times: ExecutionCount
    scope: str
    equation: JaxprEqn | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def source(self) -> str:
        """Return the line of a layer, or of a loss, that traced it, as "FILE:LINE (FUNCTION)"; empty if unknown."""
        return "" if self.equation is None else source_line(self.equation, _GENERAL)

    @property
    def purpose(self) -> str:
        """Return the declared content, such as `weights`; if none was declared, the part of the model that
        sends."""
        parts = [part for part in _PART.findall(self.scope) if part not in _WRAPPERS and not part.startswith("layers.")]
        return find_comm_tag(self.scope) or (parts[-1] if parts else "the step")

    @property
    def wire_bytes(self) -> int:
        """Return the expected bytes that a device sends in one step."""
        return round(self.sent * self.times.expected)


def list_traffic(program: OperationBlock, mesh: Mapping[str, int]) -> list[Traffic]:
    """List every collective of a program that leaves its device.

    Args:
        mesh: Mesh axis to size.
    """
    traffic = []
    for operation, times in count_executions(program):
        kind = _KINDS.get(operation.name)
        axes = () if kind is None else _axes(operation, mesh)
        if kind is not None and axes and (sent := _sent(kind, operation, math.prod(mesh[axis] for axis in axes))):
            traffic.append(Traffic(kind, axes, sent, times, operation.scope, operation.eqn))
    return traffic


def traffic_totals(traffic: Iterable[Traffic]) -> dict[tuple[CollectiveKind, MeshAxes], int]:
    """Sum the bytes by kind and mesh axes."""
    totals: dict[tuple[CollectiveKind, MeshAxes], int] = {}
    for one in traffic:
        totals[one.kind, one.axes] = totals.get((one.kind, one.axes), 0) + one.wire_bytes
    return totals


def _axes(operation: Operation, mesh: Mapping[str, int]) -> MeshAxes:
    names = collective_axes(operation.eqn)
    return tuple(axis for axis in MESH_AXES if axis in names and mesh.get(axis, 1) > 1)


def _sent(kind: CollectiveKind, operation: Operation, ways: int) -> int:
    input_bytes = sum(value.bytes for value in operation.arrays)
    output_bytes = sum(value.bytes for value in operation.outputs)
    if kind == "ragged-all-to-all":
        # Operand and result; then offsets and sizes. At equal loads the data fills the smaller one.
        whole_bytes = min(operation.arrays[0].bytes, operation.outputs[0].bytes)
    else:
        whole_bytes = output_bytes if kind in ("all-gather", "collective-permute") else input_bytes
    return ring_wire_bytes(kind, whole_bytes, ways)
