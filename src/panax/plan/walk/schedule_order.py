"""Order in which a compiler runs the operations of a block, as far as memory determines it.

A trace has them in program order: a large matrix multiplication long before it is read, or a sum long after
its operands are available. A compiler that schedules for memory moves the first later and the second earlier.
"""

import dataclasses
from collections.abc import Sequence

from .program import Operation, OperationBlock, Value
from .value_uses import FUSED, IN_PLACE_OPS, SAME_MEMORY, LivenessInfo

MATMUL_OPS = frozenset({"dot_general", "pallas_call", "ragged_dot_general"})

LARGE_DIVISOR = 16
"""Operations with results smaller than this share of the largest array are not moved."""


def reschedule(block: OperationBlock, carried: Sequence[Value]) -> OperationBlock:
    """Move large matrix multiplications later, and large sums of arrays earlier, as far as that reduces the
    live memory.

    Args:
        carried: The inputs with memory that its results reuse. Only matrix multiplications are added to one
            as soon as they are available.
    """
    carried_ids = {id(value) for value in carried}
    products = {id(v) for operation in block.operations if operation.name in MATMUL_OPS for v in operation.outputs}
    largest = max((v.bytes for operation in block.operations for v in operation.outputs), default=0)
    large = [one for one in block.operations if sum(v.bytes for v in one.outputs) * LARGE_DIVISOR >= largest]
    order = _Order(block)
    for operation in large:
        if operation.name in MATMUL_OPS:
            order = order.postponed(operation)
    for operation in large:
        read = set(map(id, operation.arrays))
        if operation.name in FUSED - IN_PLACE_OPS and (read & products or not read & carried_ids):
            order = order.advanced(operation)
    return order.block


class _Order:
    """A block's operations in one order, with derived tables."""

    def __init__(self, block: OperationBlock):
        self.block = block
        self.needs = LivenessInfo(block)
        self.place = {id(operation): number for number, operation in enumerate(block.operations)}
        self.made = {id(v): self.place[id(one)] for one in block.operations for v in one.outputs}
        self.first = self.needs.first_readers()

    def postponed(self, operation: Operation) -> "_Order":
        """Move an operation directly before its first reader, if that reduces the peak of live memory."""
        count, number = len(self.block.operations), self.place[id(operation)]
        until = min(self.first.get(id(value), count) for value in operation.outputs)
        if not number + 1 < until < count:
            return self
        later = self._moved(number, until - 1)
        return later if later._alive(number, until)[0] < self._alive(number, until)[0] else self

    def advanced(self, operation: Operation) -> "_Order":
        """Move an operation directly after its operands, if less memory is live over time and the peak does
        not grow."""
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
        """Return the maximum of the bytes alive at once in a range of operations, and their sum over the
        range."""
        operations, needs = self.block.operations, self.needs
        changes = [0] * (len(operations) + 2)
        produced = ((value, -1) for value in self.block.inputs)
        later = (
            (value, number)
            for number, operation in enumerate(operations)
            if operation.name not in SAME_MEMORY
            for value in operation.outputs
        )
        for value, start in (*produced, *later):
            if id(value) not in needs.written:
                continue
            last = needs.read.get(id(value), start)
            # An array that is read elementwise is overwritten.
            over = start < last < len(operations) and operations[last].name in FUSED
            changes[max(start, 0)] += value.bytes
            changes[last + (0 if over else 1)] -= value.bytes
        alive = peak = total = 0
        for number, change in enumerate(changes[:until]):
            alive += change
            if number >= first:
                peak, total = max(peak, alive), total + alive
        return peak, total
