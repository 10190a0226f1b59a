"""The order in which a compiler runs the operations of a block, as far as memory decides it.

A trace has them in the order of the program: a large product long before it is read, or a sum long after all of it is there. A
compiler that schedules for memory moves the first later and the second earlier.
"""

import dataclasses
from collections.abc import Sequence

from .program import Operation, OperationBlock, Value
from .value_uses import FUSED, IN_PLACE_OPS, SAME_MEMORY, LivenessInfo

MATMUL_OPS = frozenset({"dot_general", "pallas_call", "ragged_dot_general"})

LARGE_DIVISOR = 16
"""Operations whose results are smaller than this share of the largest array stay where they are."""


def reschedule(block: OperationBlock, carried: Sequence[Value]) -> OperationBlock:
    """A block with large products as late, and large sums of arrays as early, as less is alive by it.

    Args:
        carried: Of its inputs, those whose memory its results take. Only products are added to one as soon as they are there.
    """
    held = {id(value) for value in carried}
    products = {id(v) for operation in block.operations if operation.name in MATMUL_OPS for v in operation.outputs}
    largest = max((v.bytes for operation in block.operations for v in operation.outputs), default=0)
    large = [one for one in block.operations if sum(v.bytes for v in one.outputs) * LARGE_DIVISOR >= largest]
    order = _Order(block)
    for operation in large:
        if operation.name in MATMUL_OPS:
            order = order.postponed(operation)
    for operation in large:
        read = set(map(id, operation.arrays))
        if operation.name in FUSED - IN_PLACE_OPS and (read & products or not read & held):
            order = order.advanced(operation)
    return order.block


class _Order:
    """A block's operations in one order, with what follows from it."""

    def __init__(self, block: OperationBlock):
        self.block = block
        self.needs = LivenessInfo(block)
        self.place = {id(operation): number for number, operation in enumerate(block.operations)}
        self.made = {id(v): self.place[id(one)] for one in block.operations for v in one.outputs}
        self.first = self.needs.first_readers()

    def postponed(self, operation: Operation) -> "_Order":
        """With an operation right before its first reader, if the most that is alive falls."""
        count, number = len(self.block.operations), self.place[id(operation)]
        until = min(self.first.get(id(value), count) for value in operation.outputs)
        if not number + 1 < until < count:
            return self
        later = self._moved(number, until - 1)
        return later if later._alive(number, until)[0] < self._alive(number, until)[0] else self

    def advanced(self, operation: Operation) -> "_Order":
        """With an operation right after all that it reads, if less is alive over time and the most does not grow."""
        number = self.place[id(operation)]
        ready = 1 + max((self.made.get(id(value), -1) for value in operation.arrays), default=-1)
        written = all(id(value) in self.needs.written for value in operation.outputs)
        if not written or not 0 < ready < number:
            return self
        earlier = self._moved(number, ready)
        before, after = self._alive(ready, number + 1), earlier._alive(ready, number + 1)
        return earlier if after[0] <= before[0] and after[1] < before[1] else self

    def _moved(self, number: int, to: int) -> "_Order":
        order = list(self.block.operations)
        order.insert(to, order.pop(number))
        return _Order(dataclasses.replace(self.block, operations=order))

    def _alive(self, first: int, until: int) -> tuple[int, int]:
        """The most bytes alive at once from one place to another, and their sum over the places."""
        operations, needs = self.block.operations, self.needs
        changes = [0] * (len(operations) + 2)
        made = ((value, -1) for value in self.block.inputs)
        later = (
            (value, number)
            for number, operation in enumerate(operations)
            if operation.name not in SAME_MEMORY
            for value in operation.outputs
        )
        for value, start in (*made, *later):
            if id(value) not in needs.written:
                continue
            last = needs.read.get(id(value), start)
            # What is read element by element is written over.
            over = start < last < len(operations) and operations[last].name in FUSED
            changes[max(start, 0)] += value.bytes
            changes[last + (0 if over else 1)] -= value.bytes
        alive = most = total = 0
        for number, change in enumerate(changes[:until]):
            alive += change
            if number >= first:
                most, total = max(most, alive), total + alive
        return most, total
