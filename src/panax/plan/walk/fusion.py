"""Results that a compiler computes in one pass over common inputs: gradients of a gate and its input, for
example.

Such a pass overwrites its inputs. It reuses the memory of operands that are not read later, whereas results
computed one by one would coexist with all of them.
"""

import dataclasses
from collections.abc import Iterable

from .program import Operation, OperationBlock, Value
from .value_uses import FUSED, IN_PLACE_OPS, REDUCED, SAME_MEMORY, LivenessInfo


@dataclasses.dataclass
class _Pass:
    """Operations that could be computed in one pass.

    Attributes:
        sources: Their inputs in memory, including those of operations fused into them.
        ready: Index of the last operation that computes one of those; -1 for inputs.
        due: Index of the first operation that reads a result.
    """

    operations: list[Operation]
    sources: dict[int, Value]
    ready: int
    due: int

    def joined(self, other: "_Pass") -> "_Pass | None":
        """Merge two passes; None if they share no input of their results' size, or one is needed before the
        other can be computed.

        A sum of results of a pass is part of it.
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
    """Reorder a block so that the operations of each pass are adjacent; return the block and the passes."""
    passes = [
        fusion_pass
        for fusion_pass in _passes(block)
        if sum(one.name not in REDUCED for one in fusion_pass.operations) > 1
    ]
    operations = list(block.operations)
    moved: list[list[Operation]] = []
    needs = LivenessInfo(block)
    for fusion_pass in passes:
        changed = _moved(operations, fusion_pass, needs)
        if _is_ordered(changed):
            operations = changed
            moved.append(fusion_pass.operations)
    return dataclasses.replace(block, operations=operations), moved


def _passes(block: OperationBlock) -> Iterable[_Pass]:
    needs = LivenessInfo(block)
    place = {id(operation): number for number, operation in enumerate(block.operations)}
    producers = {id(value): place[id(operation)] for operation in block.operations for value in operation.outputs}
    due = needs.first_readers()
    passes: list[_Pass] = []
    for operation in block.operations:
        if operation.name not in FUSED | REDUCED or operation.name in IN_PLACE_OPS or len(operation.outputs) != 1:
            continue
        value = operation.outputs[0]
        if id(value) not in needs.written or id(value) in needs.origin:
            continue
        sources = {id(source): source for source in needs.sources(operation)}
        ready = max((producers.get(key, -1) for key in sources), default=-1)
        alone = _Pass([operation], sources, ready, due.get(id(value), len(block.operations)))
        # A result of another pass among the inputs orders the two.
        for index, other in enumerate(passes):
            both = other.joined(alone) if ready < other.due else None
            if both is not None and not any(id(one.outputs[0]) in sources for one in other.operations):
                passes[index] = both
                break
        else:
            passes.append(alone)
    return passes


def _moved(operations: list[Operation], fusion_pass: _Pass, needs: LivenessInfo) -> list[Operation]:
    """Move the operations of a pass, and everything fused into them, directly before the first reader of a
    result."""
    results = {id(needs.base(operation.outputs[0])) for operation in fusion_pass.operations}
    members = {id(operation) for operation in fusion_pass.operations}
    reads = (
        number
        for number, operation in enumerate(operations)
        if operation.name not in SAME_MEMORY and any(id(needs.base(v)) in results for v in operation.arrays)
    )
    due = min(reads, default=len(operations))
    moved = {id(value) for operation in fusion_pass.operations for value in operation.arrays}
    chain: list[Operation] = []
    for operation in reversed(operations[due:]):
        if id(operation) not in members and any(id(value) in moved for value in operation.outputs):
            chain.append(operation)
            moved |= {id(value) for value in operation.arrays}
    # Aliases of the results move with them.
    names = [
        operation
        for operation in operations[:due]
        if operation.name in SAME_MEMORY and any(id(needs.base(v)) in results for v in operation.arrays)
    ]
    moved_ids = members | {id(operation) for operation in (*chain, *names)}
    rest = [operation for operation in operations if id(operation) not in moved_ids]
    before = sum(id(operation) not in moved_ids for operation in operations[:due])
    return [*rest[:before], *reversed(chain), *fusion_pass.operations, *names, *rest[before:]]


def _is_ordered(operations: list[Operation]) -> bool:
    """Return True if every value is computed before it is read."""
    later = {id(value) for operation in operations for value in operation.outputs}
    for operation in operations:
        if any(id(value) in later for value in operation.arrays):
            return False
        later -= {id(value) for value in operation.outputs}
    return True
