"""The operation from which the first value that is not finite came: every operation of a step is flagged, then the flags are
followed backward from a result of the step."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ...compiling.equations import source_line
from ...core import TrainState, named_leaves
from ...core.jax_primitives import Literal, scan_arity, scan_length, scan_order
from ..compiled_step import CompiledStep
from .program_tree import ProgramBlock, ProgramNode, StepPhase, producers, read_tree, tapped_nodes
from .statistics import flag_array, is_measurable
from .tapped_step import run_tapped

RESULTS = ("loss", "gradient_norm", "parameter_norm")
"""Scalars of a step that are not finite if anything that its update reads is not, in the order of the program."""


@dataclasses.dataclass(frozen=True)
class FaultOrigin:
    """Where the first value that is not finite came from.

    Attributes:
        path: The module, such as "layers.3/attention"; empty for an input of the step or outside of any module.
        phase: The phase of the step; None for an input.
        operation: The primitive with finite operands and a result that is not; for an input its name, such as
            "params.embedding.table" or "batch.y".
        kind: "NaN" or "infinity".
        line: The line of source that the operation came from; empty if unknown.
        result: The scalar of the step from which it was followed back.
        through: Modules that passed it on, from the origin to the result.
    """

    path: str
    phase: StepPhase | None
    operation: str
    kind: str
    line: str
    result: str
    through: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Frame:
    """A block that runs: within which call, and in which iterations of the enclosing loops.

    Attributes:
        caller: The node that runs it, in the frame `outer`; None for the whole step.
        turn: The number of the iteration, by position of its results; None outside of a loop.
    """

    block: ProgramBlock
    outer: "_Frame | None" = None
    caller: ProgramNode | None = None
    turn: int | None = None

    @property
    def turns(self) -> tuple[int, ...]:
        above = () if self.outer is None else self.outer.turns
        return above if self.turn is None else (*above, self.turn)


@dataclasses.dataclass(frozen=True)
class _Value:
    """A result of an operation in a frame, or an input of the step.

    Attributes:
        node: None for an input, with its number in `index`.
    """

    frame: _Frame
    node: ProgramNode | None
    index: int

    @property
    def key(self) -> tuple[Any, ...]:
        return (id(self.node), self.index, self.frame.turns)


def find_origin(step: CompiledStep, state: TrainState, batch: Mapping[str, jax.Array]) -> FaultOrigin | None:
    """Find where the first value that is not finite came from; None if loss, gradients and update are finite.

    The step is compiled again, with two flags of each result of each operation; the state is not donated. A conditional and a
    `while` are one operation. Infinity that the program writes as a constant, such as in a mask, is not an origin.
    """
    traced = step.trace(batch)
    block = read_tree(traced.jaxpr)
    tap_all(block)
    (_, scalars), records = run_tapped(step, traced, block, flag_array)(state, batch)
    values = {name: float(scalars[name]) for name in RESULTS if name in scalars}
    result = next((name for name, value in values.items() if not np.isfinite(value)), None)
    if result is None:
        return None
    names = list(named_leaves(traced.out_info))
    flags = _Flags(block, jax.device_get(records), _input_flags(state, batch))
    return _follow(flags, names.index(f"1.{result}"), result, _input_names(state, batch))


def tap_all(block: ProgramBlock) -> None:
    """Mark each result of each operation that holds real numbers."""
    for node in block.walk():
        if node.block is None:
            avals: list[Any] = [variable.aval for variable in node.eqn.outvars]
            node.taps = tuple(
                index
                for index, aval in enumerate(avals)
                if hasattr(aval, "shape") and is_measurable(aval.shape, aval.dtype)
            )


def _input_names(state: TrainState, batch: Mapping[str, Any]) -> list[str]:
    return [*named_leaves(state), *(f"batch.{name}" for name in named_leaves(dict(batch)))]


def _input_flags(state: TrainState, batch: Mapping[str, Any]) -> list[np.ndarray]:
    def flags(leaf: Any) -> Any:
        return flag_array(leaf) if is_measurable(leaf.shape, leaf.dtype) else np.zeros(2, bool)

    return jax.device_get([flags(leaf) for leaf in jax.tree.leaves((state, dict(batch)))])


class _Flags:
    """The flags of a step that has run: for each value, whether it held NaN, and infinity."""

    def __init__(self, block: ProgramBlock, records: Sequence[np.ndarray], inputs: Sequence[np.ndarray]):
        self.block, self._inputs, self._made = block, inputs, dict[int, Mapping[Any, tuple[ProgramNode, int]]]()
        self._records: dict[tuple[int, int], np.ndarray] = {}
        for (node, index, loops), record in zip(tapped_nodes(block), records, strict=True):
            # On any of the devices that ran it.
            devices = tuple(at for at, loop in enumerate(loops) if not loop.is_scan)
            self._records[id(node), index] = np.asarray(record.any(axis=devices))

    def made(self, block: ProgramBlock) -> Mapping[Any, tuple[ProgramNode, int]]:
        if id(block) not in self._made:
            self._made[id(block)] = producers(block)
        return self._made[id(block)]

    def of(self, value: _Value) -> tuple[bool, bool]:
        """Return whether a value holds NaN, and infinity."""
        if value.node is None:
            found = self._inputs[value.index]
        else:
            record = self._records.get((id(value.node), value.index))
            if record is None:
                return False, False
            found = record[value.frame.turns]
        return bool(found[0]), bool(found[1])

    def resolve(self, frame: _Frame, atom: Any, turn: int | None = None) -> Iterator[_Value]:
        """Yield the operations or inputs that a variable's value came from, through calls and loops; several for the results
        of all iterations of a loop, the one of `turn` first."""
        if isinstance(atom, Literal):
            return
        if atom in self.made(frame.block):
            node, index = self.made(frame.block)[atom]
            if node.block is None:
                yield _Value(frame, node, index)
            elif node.is_scan:
                yield from self._from_scan(frame, node, index, turn)
            else:
                yield from self.resolve(_Frame(node.block, frame, node), node.block.jaxpr.outvars[index], turn)
        elif atom in frame.block.jaxpr.invars:
            index = list(frame.block.jaxpr.invars).index(atom)
            if frame.outer is None or frame.caller is None:
                yield _Value(frame, None, index)
            else:
                yield from self._from_caller(frame, frame.outer, frame.caller, index, turn)

    def _from_scan(self, frame: _Frame, node: ProgramNode, index: int, turn: int | None) -> Iterator[_Value]:
        assert node.block is not None
        length, atom = scan_length(node.eqn), node.block.jaxpr.outvars[index]
        if length == 0:
            return
        if index < scan_arity(node.eqn).carry:
            turns = [0 if scan_order(node.eqn).reverse else length - 1]
        else:
            turns = sorted(range(length), key=lambda each: each != turn)
        for each in turns:
            yield from self.resolve(_Frame(node.block, frame, node, each), atom)

    def _from_caller(
        self, frame: _Frame, outer: _Frame, node: ProgramNode, index: int, turn: int | None
    ) -> Iterator[_Value]:
        if not node.is_scan or frame.turn is None:
            yield from self.resolve(outer, node.eqn.invars[index], turn)
            return
        (consts, carry), reverse = scan_arity(node.eqn), scan_order(node.eqn).reverse
        before = frame.turn + (1 if reverse else -1)
        if consts <= index < consts + carry and 0 <= before < scan_length(node.eqn):
            following = dataclasses.replace(frame, turn=before)
            yield from self.resolve(following, frame.block.jaxpr.outvars[index - consts])
        else:
            # Of an array with an entry for each iteration, the one of this.
            yield from self.resolve(outer, node.eqn.invars[index], frame.turn if index >= consts + carry else None)


def _follow(flags: _Flags, result: int, name: str, inputs: Sequence[str]) -> FaultOrigin | None:
    frame = _Frame(flags.block)
    current = _worst(flags, flags.resolve(frame, flags.block.jaxpr.outvars[result]), wants_nan=True)
    seen: set[tuple[Any, ...]] = set()
    through: list[str] = []
    while current is not None and current.node is not None:
        seen.add(current.key)
        path = _path(current)
        if path and path not in through[-1:]:
            through.append(path)
        operands = [
            value
            for atom in current.node.eqn.invars
            for value in flags.resolve(current.frame, atom)
            if value.key not in seen
        ]
        before = _worst(flags, operands, wants_nan=flags.of(current)[0])
        if before is None:
            return _origin(flags, current, name, tuple(through[::-1]))
        current = before
    if current is None:
        return None
    return FaultOrigin("", None, inputs[current.index], _kind(flags.of(current)), "", name, tuple(through[::-1]))


def _worst(flags: _Flags, values: Iterator[_Value] | Sequence[_Value], wants_nan: bool) -> _Value | None:
    """Return a value with NaN if there is one that explains NaN, otherwise one with infinity; None if all are finite."""
    infinite = None
    for value in values:
        nan, inf = flags.of(value)
        if nan and wants_nan:
            return value
        if inf and infinite is None and not _is_constant(value.node):
            infinite = value
    return infinite


def _is_constant(node: ProgramNode | None) -> bool:
    """Return True for an operation that reads nothing but literals, such as one that fills a mask with -inf."""
    return node is not None and all(isinstance(atom, Literal) for atom in node.eqn.invars)


def _origin(flags: _Flags, value: _Value, result: str, through: tuple[str, ...]) -> FaultOrigin:
    assert value.node is not None
    node = value.node
    # An operation in a function of JAX that was traced before has no line of its own.
    callers = (frame.caller for frame in _outward(value.frame))
    lines = (source_line(each.eqn) for each in (node, *callers) if each is not None)
    line = next(filter(None, lines), "")
    return FaultOrigin(_path(value), node.place.phase, node.name, _kind(flags.of(value)), line, result, through)


def _kind(flags: tuple[bool, bool]) -> str:
    return "NaN" if flags[0] else "infinity"


def _path(value: _Value) -> str:
    """Return the module of an operation, with the number of the iteration in place of a "*"."""
    assert value.node is not None
    path, frame = "/".join(value.node.place.path), value.frame
    turn = next((each.turn for each in _outward(frame) if each.turn is not None), None)
    return path if turn is None else path.replace("*", str(turn))


def _outward(frame: _Frame | None) -> Iterator[_Frame]:
    while frame is not None:
        yield frame
        frame = frame.outer
