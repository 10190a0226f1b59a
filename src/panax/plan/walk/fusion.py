"""Results that a compiler makes in one pass over what they are all made of: gradients of a gate and its input, for example.

Such a pass writes over what it has read. So it takes the memory of as many of its operands as nobody reads later, where results
that were made one by one would stand beside all of them.
"""

import dataclasses
from collections.abc import Iterable

from .program import Operation, OperationBlock, Value
from .value_uses import FUSED, IN_PLACE_OPS, REDUCED, SAME_MEMORY, LivenessInfo


@dataclasses.dataclass
class _Pass:
    """Operations that could be made in one pass.

    Attributes:
        sources: What is in memory of what they are made of, through all that is fused into them.
        ready: The place of the last operation that makes one of those; -1 for inputs.
        due: The place of the first operation that reads a result.
    """

    operations: list[Operation]
    sources: dict[int, Value]
    ready: int
    due: int

    def joined(self, other: "_Pass") -> "_Pass | None":
        """Both as one; None where they share nothing of their results' size, or one is needed before the other can be made.

        A sum of what a pass makes anyway is part of it.
        """
        size, added = self.operations[0].outputs[0].bytes, other.operations[0]
        if self.operations[0].name in REDUCED or (size != added.outputs[0].bytes and added.name not in REDUCED):
            return None
        shared = self.sources.keys() & other.sources.keys()
        ready, due = max(self.ready, other.ready), min(self.due, other.due)
        if ready >= due or not any(self.sources[key].bytes == size for key in shared):
            return None
        return _Pass([*self.operations, *other.operations], self.sources | other.sources, ready, due)


def group_passes(block: OperationBlock) -> tuple[OperationBlock, list[list[Operation]]]:
    """A block with the operations of each such pass one after the other, and those passes."""
    passes = [found for found in _passes(block) if sum(one.name not in REDUCED for one in found.operations) > 1]
    operations = list(block.operations)
    moved: list[list[Operation]] = []
    needs = LivenessInfo(block)
    for found in passes:
        changed = _moved(operations, found, needs)
        if _is_ordered(changed):
            operations = changed
            moved.append(found.operations)
    return dataclasses.replace(block, operations=operations), moved


def _passes(block: OperationBlock) -> Iterable[_Pass]:
    needs = LivenessInfo(block)
    place = {id(operation): number for number, operation in enumerate(block.operations)}
    made = {id(value): place[id(operation)] for operation in block.operations for value in operation.outputs}
    due = needs.first_readers()
    passes: list[_Pass] = []
    for operation in block.operations:
        if operation.name not in FUSED | REDUCED or operation.name in IN_PLACE_OPS or len(operation.outputs) != 1:
            continue
        value = operation.outputs[0]
        if id(value) not in needs.written or id(value) in needs.origin:
            continue
        sources = {id(source): source for source in needs.sources(operation)}
        ready = max((made.get(key, -1) for key in sources), default=-1)
        alone = _Pass([operation], sources, ready, due.get(id(value), len(block.operations)))
        # A result of another pass among the sources orders the two.
        for index, other in enumerate(passes):
            both = other.joined(alone) if ready < other.due else None
            if both is not None and not any(id(one.outputs[0]) in sources for one in other.operations):
                passes[index] = both
                break
        else:
            passes.append(alone)
    return passes


def _moved(operations: list[Operation], found: _Pass, needs: LivenessInfo) -> list[Operation]:
    """The operations of a pass, and all that is fused into them, right before the first reader of a result."""
    results = {id(needs.base(operation.outputs[0])) for operation in found.operations}
    members = {id(operation) for operation in found.operations}
    reads = (
        number
        for number, operation in enumerate(operations)
        if operation.name not in SAME_MEMORY and any(id(needs.base(v)) in results for v in operation.arrays)
    )
    due = min(reads, default=len(operations))
    wanted = {id(value) for operation in found.operations for value in operation.arrays}
    chain: list[Operation] = []
    for operation in reversed(operations[due:]):
        if id(operation) not in members and any(id(value) in wanted for value in operation.outputs):
            chain.append(operation)
            wanted |= {id(value) for value in operation.arrays}
    # Other names of the results go with them.
    names = [
        operation
        for operation in operations[:due]
        if operation.name in SAME_MEMORY and any(id(needs.base(v)) in results for v in operation.arrays)
    ]
    taken = members | {id(operation) for operation in (*chain, *names)}
    rest = [operation for operation in operations if id(operation) not in taken]
    before = sum(id(operation) not in taken for operation in operations[:due])
    return [*rest[:before], *reversed(chain), *found.operations, *names, *rest[before:]]


def _is_ordered(operations: list[Operation]) -> bool:
    """Whether every value is made before it is read."""
    later = {id(value) for operation in operations for value in operation.outputs}
    for operation in operations:
        if any(id(value) in later for value in operation.arrays):
            return False
        later -= {id(value) for value in operation.outputs}
    return True
