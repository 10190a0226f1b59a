"""How often a step does what its program says: loops multiplied, branches weighted."""

from collections.abc import Iterator
from typing import NamedTuple

from ...core.jax_primitives import scan_length
from ...core.layout.declarations import find_branch_probs, find_trip_count
from .program import Operation, OperationBlock


class ExecutionCount(NamedTuple):
    """How many times an operation runs in a step.

    Attributes:
        expected: As declared, or the only number that is possible; where nothing was declared, once for each turn and branch.
        most: At most; None where nothing says.
    """

    expected: float
    most: float | None

    def times(self, expected: float, most: float | None) -> "ExecutionCount":
        return ExecutionCount(self.expected * expected, None if self.most is None or most is None else self.most * most)


ONCE = ExecutionCount(1.0, 1.0)


def count_executions(
    program: OperationBlock, times: ExecutionCount = ONCE
) -> Iterator[tuple[Operation, ExecutionCount]]:
    """Every operation that is neither a loop nor a choice, with how often it runs."""
    for operation in program.operations:
        if not operation.blocks:
            yield operation, times
            continue
        for block, inside in zip(operation.blocks, _inside(operation, times)):
            yield from count_executions(block, inside)


def undeclared_loops(program: OperationBlock) -> tuple[str, ...]:
    """Where the loops are of which nothing says how often they turn: what is in them is counted once."""
    found = (o for o in program.walk() if o.name == "while" and find_trip_count(_own(o)) is None)
    return tuple(dict.fromkeys(f"a while loop in {operation.scope or 'the step'}" for operation in found))


def _inside(operation: Operation, times: ExecutionCount) -> list[ExecutionCount]:
    """How often each of an operation's blocks runs."""
    if operation.name == "scan":
        length = float(scan_length(operation.eqn))
        return [times.times(length, length)]
    if operation.name == "while":
        declared = find_trip_count(_own(operation))
        expected, most = (1.0, None) if declared is None else map(float, declared)
        return [times.times(expected + 1, None if most is None else most + 1), times.times(expected, most)]
    each = find_branch_probs(_own(operation)) or [1.0] * len(operation.blocks)
    return [times.times(share, 1.0) for share in each]


def _own(operation: Operation) -> str:
    return str(operation.eqn.source_info.name_stack)
