"""The values that leave a module, forward (activations) and backward (gradients), as taps of a step's tree."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.jax_primitives import Literal, is_shard_map, scan_arity, scan_order
from .program_tree import ModulePlace, ProgramBlock, ProgramNode, StepPhase, producers, tapped_nodes
from .statistics import FIELDS, ArrayStatistics, is_measurable, read_statistics

_PHASES = (StepPhase.FORWARD, StepPhase.BACKWARD)


@dataclasses.dataclass(frozen=True)
class ModuleOutput:
    """Statistics of a value that leaves a module.

    Attributes:
        path: The module, such as "layers.3/attention"; empty outside of any.
        phase: Forward for an activation, backward for the gradient with respect to one.
        shape: Shape on one device, in one iteration.
        repeats: Number of iterations of loops over which the statistics are merged.
        operation: The primitive that computed it.
    """

    path: str
    phase: StepPhase
    shape: tuple[int, ...]
    dtype: str
    repeats: int
    operation: str
    statistics: ArrayStatistics


def tap_module_outputs(block: ProgramBlock) -> None:
    """Mark the values that leave a module, in a block and all inside it.

    A value leaves its module if an operation of the same phase outside of it reads it, or the next iteration of a loop. Values
    that only the backward pass reads are not outputs of a module.
    """
    made = producers(block)
    for node in block.nodes:
        for atom in node.eqn.invars:
            _tap_if_left(made, atom, node.place)
        if node.block is not None:
            tap_module_outputs(node.block)
            if node.is_scan:
                _tap_carry(node)


def _tap_if_left(made: Mapping[Any, tuple[ProgramNode, int]], atom: Any, reader: ModulePlace) -> None:
    if isinstance(atom, Literal) or atom not in made:
        return
    node, index = made[atom]
    place = node.place
    if place.phase not in _PHASES or reader.phase is not place.phase or reader.inside(place):
        return
    _tap(node, index)


def _tap_carry(loop: ProgramNode) -> None:
    """Mark what an iteration passes on to the next one, if a module computed it."""
    assert loop.block is not None
    made, carried = producers(loop.block), scan_arity(loop.eqn).carry
    for atom in loop.block.jaxpr.outvars[:carried]:
        if not isinstance(atom, Literal) and atom in made:
            node, index = made[atom]
            if node.place.phase in _PHASES and len(node.place.path) > len(loop.place.path):
                _tap(node, index)


def _tap(node: ProgramNode, index: int) -> None:
    aval: Any = node.eqn.outvars[index].aval
    is_array = len(getattr(aval, "shape", ())) > 0
    if node.block is None and is_array and is_measurable(aval.shape, aval.dtype) and index not in node.taps:
        node.taps = tuple(sorted((*node.taps, index)))
    elif node.block is not None and not node.is_scan and not is_shard_map(node.eqn):
        # What a call returns is tapped where it is computed.
        inner, atom = producers(node.block), node.block.jaxpr.outvars[index]
        if not isinstance(atom, Literal) and atom in inner:
            _tap(*inner[atom])


def read_module_outputs(block: ProgramBlock, records: Sequence[np.ndarray]) -> list[ModuleOutput]:
    """Return the module outputs of a step in the order in which they were computed, layer by layer.

    Args:
        records: The measured taps of `run_block`, on the host.
    """
    outputs: list[tuple[tuple[int, ...], ModuleOutput]] = []
    loops_seen: dict[ProgramNode, int] = {}
    for order, ((node, index, loops), record) in enumerate(zip(tapped_nodes(block), records, strict=True)):
        at = _layer_loop(node, loops)
        if at is None:
            outputs.append(((order,), _output(node, index, record, None)))
            continue
        # The taps of one loop over layers stand together, sorted by its iterations.
        first = loops_seen.setdefault(loops[at], order)
        parts = np.moveaxis(record, at, 0)
        for number, part in enumerate(parts):
            turn = len(parts) - number if scan_order(loops[at].eqn).reverse else number
            outputs.append(((first, turn, order), _output(node, index, part, number)))
    return [output for _, output in sorted(outputs, key=lambda pair: pair[0])]


def _output(node: ProgramNode, index: int, record: np.ndarray, layer: int | None) -> ModuleOutput:
    aval: Any = node.eqn.outvars[index].aval
    vectors, path = record.reshape(-1, FIELDS), "/".join(node.place.path)
    return ModuleOutput(
        path if layer is None else path.replace("*", str(layer)),
        node.place.phase,
        tuple(aval.shape),
        str(aval.dtype),
        len(vectors),
        node.name,
        read_statistics(vectors, int(np.prod(aval.shape, dtype=np.int64))),
    )


def _layer_loop(node: ProgramNode, loops: Sequence[ProgramNode]) -> int | None:
    """Return the index of the loop over layers among the enclosing ones: the innermost one, if its body names layers by "*"."""
    own = next((each for each, part in enumerate(node.place.path) if "*" in part), None)
    for at in range(len(loops) - 1, -1, -1):
        outside = len(loops[at].place.path)
        if own is not None and loops[at].is_scan and own >= outside:
            return at
    return None
