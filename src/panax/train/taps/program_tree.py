"""A traced step as a tree of blocks, which can be run again with further results.

Calls, loops and the programs of shards are opened; a conditional and a `while` stay one operation. Each operation has the
module that traced it and the phase of the step: forward, backward, or the rest (the update).
"""

import dataclasses
import enum
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ...compiling.equations import run_equation
from ...core.jax_primitives import (
    REMATERIALIZED,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    called_program,
    is_shard_map,
    open_jaxpr,
    read_constants,
    read_parameter,
    read_shard_map,
    scan_arity,
    scan_length,
    scan_order,
    shard_map_mesh,
)

_WRAPPED = re.compile(r"^(jvp|transpose|vmap|remat|checkpoint|rematted_computation)\((.*)\)$")
_RECOMPUTED = "rematted_computation"
_TRANSFORMS = frozenset({"checkpoint", "remat", _RECOMPUTED})
_OPAQUE = frozenset({"custom_partitioning"})
"""Calls that are one operation here: to open them would change how they are sharded."""


class StepPhase(enum.Enum):
    """The part of a step that an operation belongs to."""

    FORWARD = "forward"
    RECOMPUTED = "recomputed"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclasses.dataclass(frozen=True)
class ModulePlace:
    """The module in which an operation was traced.

    Attributes:
        path: Names of modules, outermost first; "*" stands for the layers of a loop.
    """

    phase: StepPhase
    path: tuple[str, ...]

    def inside(self, other: "ModulePlace") -> bool:
        """Return True if this place is that of `other`, or within it, in the same phase."""
        return self.phase is other.phase and self.path[: len(other.path)] == other.path


@dataclasses.dataclass(eq=False)
class ProgramNode:
    """One operation, or a call, a loop or a program of shards with its block.

    Attributes:
        block: The opened program; None for an operation.
        taps: Indices of the results that are recorded.
    """

    eqn: JaxprEqn
    place: ModulePlace
    block: "ProgramBlock | None" = None
    taps: tuple[int, ...] = ()

    @property
    def is_scan(self) -> bool:
        return self.block is not None and self.eqn.primitive.name == "scan"

    @property
    def name(self) -> str:
        return self.eqn.primitive.name


@dataclasses.dataclass(eq=False)
class ProgramBlock:
    """A program: its variables and its operations in order.

    Attributes:
        constants: Variables of constants, with their arrays.
    """

    jaxpr: Jaxpr
    constants: tuple[tuple[Any, Any], ...]
    nodes: list[ProgramNode]

    def walk(self) -> Iterator[ProgramNode]:
        """Yield all nodes in the order in which they run; a node with a block comes before those inside."""
        for node in self.nodes:
            yield node
            if node.block is not None:
                yield from node.block.walk()

    @property
    def has_taps(self) -> bool:
        return any(node.taps for node in self.walk())


def read_tree(program: ClosedJaxpr | Jaxpr, outer: ModulePlace | None = None) -> ProgramBlock:
    """Read a traced function as a tree.

    Args:
        outer: The place of the call that runs it.
    """
    jaxpr = open_jaxpr(program)
    constants = tuple(read_constants(program)) if isinstance(program, ClosedJaxpr) else ()
    return ProgramBlock(jaxpr, constants, [_node(eqn, outer) for eqn in jaxpr.eqns])


def _node(eqn: JaxprEqn, outer: ModulePlace | None) -> ProgramNode:
    place = _place(str(eqn.source_info.name_stack), outer)
    program = None
    if eqn.primitive.name == "scan":
        program = read_parameter(eqn, "jaxpr")
    elif is_shard_map(eqn):
        program = read_shard_map(eqn).jaxpr
    elif eqn.primitive.name not in _OPAQUE:
        program = called_program(eqn)
    return ProgramNode(eqn, place, None if program is None else read_tree(program, place))


def _place(stack: str, outer: ModulePlace | None) -> ModulePlace:
    """Parse the names of an equation, such as "transpose(jvp(final_norm))"."""
    phase = outer.phase if outer is not None else StepPhase.UPDATE
    path = outer.path if outer is not None else ()
    for part in _split_stack(stack):
        while (match := _WRAPPED.match(part)) is not None:
            if match[1] == "jvp" and phase is StepPhase.UPDATE:
                phase = StepPhase.FORWARD
            if match[1] == "transpose":
                phase = StepPhase.BACKWARD
            part = match[2]
        names = part.split("/")
        if _RECOMPUTED in names:
            phase = StepPhase.RECOMPUTED
        path = _joined(path, tuple(filter(_is_module, names)))
    return ModulePlace(phase, path)


def _is_module(name: str) -> bool:
    """Return False for the legend of a contraction, the tag of a message, and JAX's own names."""
    return bool(name) and "->" not in name and ":" not in name and name not in _TRANSFORMS


def _joined(outer: tuple[str, ...], own: tuple[str, ...]) -> tuple[str, ...]:
    """Join two paths; a program that was traced inside of its caller's modules repeats their names.

    >>> _joined(("layers.*", "attention"), ("layers.*", "attention", "norm"))
    ('layers.*', 'attention', 'norm')
    """
    common = next((k for k in range(min(len(outer), len(own)), 0, -1) if outer[-k:] == own[:k]), 0)
    return (*outer, *own[common:])


def _split_stack(stack: str) -> Iterator[str]:
    """Yield the parts of a name stack between slashes that no parentheses enclose."""
    depth, begin = 0, 0
    for at, character in enumerate(stack):
        depth += (character == "(") - (character == ")")
        if character == "/" and depth == 0:
            yield stack[begin:at]
            begin = at + 1
    yield stack[begin:]


MeasureArray = Callable[[jax.Array], jax.Array]
"""Summarizes an array in a vector."""

BlockResults = tuple[list[Any], list[jax.Array]]
"""Results of a block, and its measured taps."""

TapPlace = tuple[ProgramNode, int, tuple[ProgramNode, ...]]
"""A node, the index of its result, and the enclosing loops and programs of shards."""


def run_block(block: ProgramBlock, operands: Sequence[Any], measure: MeasureArray) -> BlockResults:
    """Run a program; return its results, and the measured taps in the order of `ProgramBlock.walk`.

    Inside a loop a tap has a leading dimension of iterations, inside a program of shards one of devices.
    """
    values: dict[Any, Any] = dict(block.constants) | dict(zip(block.jaxpr.invars, operands, strict=True))
    records: list[jax.Array] = []
    for node in block.nodes:
        inputs = [atom.val if isinstance(atom, Literal) else values[atom] for atom in node.eqn.invars]
        results, inner = _run_node(node, inputs, measure)
        records += [measure(results[index]) for index in node.taps]
        records += inner
        values.update(zip(node.eqn.outvars, results, strict=True))
    outputs = [atom.val if isinstance(atom, Literal) else values[atom] for atom in block.jaxpr.outvars]
    return outputs, records


def _run_node(node: ProgramNode, inputs: list[Any], measure: MeasureArray) -> BlockResults:
    if node.block is None or not node.block.has_taps:
        return run_equation(node.eqn, inputs), []
    if node.is_scan:
        return _run_scan(node, node.block, inputs, measure)
    if is_shard_map(node.eqn):
        return _run_shards(node, node.block, inputs, measure)
    if node.name in REMATERIALIZED and read_parameter(node.eqn, "differentiated"):
        inputs = jax.lax.optimization_barrier(inputs)
    return run_block(node.block, inputs, measure)


def _run_scan(node: ProgramNode, block: ProgramBlock, inputs: list[Any], measure: MeasureArray) -> BlockResults:
    (consts, carried), order = scan_arity(node.eqn), scan_order(node.eqn)

    def body(carry: list[Any], scanned: list[Any]) -> Any:
        outputs, records = run_block(block, [*inputs[:consts], *carry, *scanned], measure)
        return outputs[:carried], (outputs[carried:], records)

    carry, (stacked, records) = jax.lax.scan(
        body,
        inputs[consts : consts + carried],
        inputs[consts + carried :],
        length=scan_length(node.eqn),
        reverse=order.reverse,
        unroll=order.unroll,
    )
    return [*carry, *stacked], records


def _run_shards(node: ProgramNode, block: ProgramBlock, inputs: list[Any], measure: MeasureArray) -> BlockResults:
    shards, (mesh, manual_axes) = read_shard_map(node.eqn), shard_map_mesh(node.eqn)
    every = PartitionSpec(tuple(axis for axis in shards.sizes if axis in manual_axes))

    def local(*operands: Any) -> Any:
        outputs, records = run_block(block, operands, measure)
        return outputs, [record[None] for record in records]

    outputs, records = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(shards.in_specs),
        out_specs=(list(shards.out_specs), every),
        axis_names=set(manual_axes),
        check_vma=False,
    )(*inputs)
    return outputs, records


def tapped_nodes(block: ProgramBlock, loops: tuple[ProgramNode, ...] = ()) -> Iterator[TapPlace]:
    """Yield (node, index of its result, enclosing loops and programs of shards) for each tap, in the order of
    `run_block`."""
    for node in block.nodes:
        for index in node.taps:
            yield node, index, loops
        if node.block is not None and node.block.has_taps:
            opens = node.is_scan or is_shard_map(node.eqn)
            yield from tapped_nodes(node.block, (*loops, node) if opens else loops)


def producers(block: ProgramBlock) -> Mapping[Any, tuple[ProgramNode, int]]:
    """Return, for each variable that a block computes, its node and its index among the node's results."""
    return {variable: (node, index) for node in block.nodes for index, variable in enumerate(node.eqn.outvars)}
