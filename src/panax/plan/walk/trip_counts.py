"""Number of executions of a step's operations: loops multiplied, branches weighted."""

from collections.abc import Iterator
from typing import NamedTuple

from ...core.jax_primitives import scan_length
from ...core.layout.declarations import find_branch_probs, find_trip_count
from .program import Operation, OperationBlock


class ExecutionCount(NamedTuple):
    """Number of executions of an operation in a step.

    Attributes:
        expected: The declared or static count; an undeclared loop or branch counts once.
        maximum: The maximum count; None if unknown.
    """

    expected: float
    maximum: float | None

    def times(self, expected: float, maximum: float | None) -> "ExecutionCount":
        return ExecutionCount(
            self.expected * expected, None if self.maximum is None or maximum is None else self.maximum * maximum
        )


ONCE = ExecutionCount(1.0, 1.0)


def count_executions(
    program: OperationBlock, times: ExecutionCount = ONCE
) -> Iterator[tuple[Operation, ExecutionCount]]:
    """Yield every operation that is neither a loop nor a conditional, with its number of executions."""
    for operation in program.operations:
        if not operation.blocks:
            yield operation, times
            continue
        for block, inside in zip(operation.blocks, _inside(operation, times)):
            yield from count_executions(block, inside)


def undeclared_loops(program: OperationBlock) -> tuple[str, ...]:
    """Return the locations of loops with unknown trip counts: their content is counted once."""
    found = (o for o in program.walk() if o.name == "while" and find_trip_count(_own(o)) is None)
    return tuple(dict.fromkeys(f"a while loop in {operation.scope or 'the step'}" for operation in found))


def _inside(operation: Operation, times: ExecutionCount) -> list[ExecutionCount]:
    """Return the number of executions of each of an operation's blocks."""
    if operation.name == "scan":
        length = float(scan_length(operation.eqn))
        return [times.times(length, length)]
    if operation.name == "while":
        declared = find_trip_count(_own(operation))
        expected, max_trips = (1.0, None) if declared is None else map(float, declared)
        return [
            times.times(expected + 1, None if max_trips is None else max_trips + 1),
            times.times(expected, max_trips),
        ]
    each = find_branch_probs(_own(operation)) or [1.0] * len(operation.blocks)
    return [times.times(share, 1.0) for share in each]


def _own(operation: Operation) -> str:
    return str(operation.eqn.source_info.name_stack)
