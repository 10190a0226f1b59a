"""Memory of a traced step: the arrays that a compiler would materialize, their lifetimes, and their packing.

An estimate, before anything is compiled. Elementwise computations are assumed to be fused into their readers,
and are materialized only if a matrix multiplication, a collective, a kernel or a loop reads them. Loops and
updates work in place if the old array is not read any more. Arrays are then packed as XLA packs them: the
largest first, each at the lowest address that is free during its lifetime.
"""

import dataclasses
import math
from collections.abc import Sequence

from ...core.jax_primitives import contracted_dims, gathered_dim, scan_arity, scattered_dim, while_arity
from .fusion import group_passes
from .program import Operation, OperationBlock, Value, operand_shape
from .schedule_order import reschedule
from .value_uses import FUSED, IN_PLACE_OPS, SAME_MEMORY, LivenessInfo

_TURNED = frozenset({"all_gather", "reduce_scatter"})

_SMALL = 1 / 4096
"""Buffers below this share of the largest one are summed and not packed."""


@dataclasses.dataclass(eq=False)
class LiveRange:
    """Memory from one moment of a step to another, both included."""

    bytes: int
    start: int
    end: int
    value: Value


def peak_bytes(block: OperationBlock, donated: Sequence[Value] = ()) -> int:
    """Return the memory of the arrays made inside a block, in bytes; its inputs belong to the caller.

    Args:
        donated: The inputs with memory that results may reuse.
    """
    return packed_bytes(list_buffers(block, donated))


def list_buffers(block: OperationBlock, donated: Sequence[Value] = ()) -> list[LiveRange]:
    """Return the arrays that a block materializes."""
    timeline = _Timeline()
    timeline.lay(block, donated)
    return timeline.buffers


def packed_bytes(buffers: Sequence[LiveRange]) -> int:
    """Return the total height of all buffers, packed by size: each at the lowest address that is free during
    its lifetime.

    >>> import jax
    >>> value = Value.of(jax.ShapeDtypeStruct((), "int8"))
    >>> packed_bytes([LiveRange(4, 0, 1, value), LiveRange(2, 1, 2, value), LiveRange(4, 2, 3, value)])
    6
    """
    floor = max((buffer.bytes for buffer in buffers), default=0) * _SMALL
    placed: list[tuple[int, LiveRange]] = []
    for buffer in sorted(buffers, key=lambda b: -b.bytes):
        if buffer.bytes < floor:
            continue
        address = 0
        for start, other in placed:
            if other.start <= buffer.end and buffer.start <= other.end and start < address + buffer.bytes:
                address = max(address, start + other.bytes)
        placed.append((address, buffer))
        placed.sort(key=lambda pair: pair[0])
    small = [buffer for buffer in buffers if buffer.bytes < floor]
    return max((address + buffer.bytes for address, buffer in placed), default=0) + _most_alive(small)


def _most_alive(buffers: Sequence[LiveRange]) -> int:
    changes = [(b.start, b.bytes) for b in buffers] + [(b.end + 1, -b.bytes) for b in buffers]
    alive = most = 0
    for _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most


class _Timeline:
    """Buffers of a block and of its inner blocks, on one clock."""

    def __init__(self) -> None:
        self.clock = 0
        self.buffers: list[LiveRange] = []

    def lay(self, block: OperationBlock, carried: Sequence[Value], *, inside: bool = False) -> None:
        """Add the arrays that a block materializes.

        Args:
            carried: The inputs with memory that its results reuse.
        """
        block, passes = group_passes(reschedule(block, carried))
        needs = LivenessInfo(block)
        places = {id(operation): place for place, operation in enumerate(block.operations)}
        together = {
            places[id(one)]: places[id(pass_operations[-1])] for pass_operations in passes for one in pass_operations
        }
        frees: dict[int, list[Value]] = {}
        spans = []
        for operation in block.operations:
            start = self.clock = self.clock + 1
            for inner in operation.blocks:
                first, count = _carried(operation)
                self.lay(inner, inner.inputs[first : first + count], inside=True)
            spans.append((start, self.clock))
        self.clock += 1
        spans.append((self.clock, self.clock))
        memory: dict[int, LiveRange] = {id(v): LiveRange(v.bytes, 0, 0, v) for v in carried}
        added = {id(value) for value in needs.accumulated_products(carried)}
        for place, operation in enumerate(block.operations):
            at = together.get(place, place)
            if at not in frees:
                sources = {id(base): base for one in block.operations[place : at + 1] for base in needs.sources(one)}
                frees[at] = [
                    base for key, base in sources.items() if place <= needs.read.get(key, -1) <= at and key in memory
                ]
            free = frees[at]
            for number, value in enumerate(operation.outputs):
                if id(value) not in needs.written or id(value) in needs.origin or id(value) in added:
                    continue
                end = spans[needs.read.get(id(value), place)][1]
                reused = self._reusable_operand(operation, number, value, free, needs)
                if reused is not None:
                    free.remove(reused)
                    buffer = memory[id(reused)]
                    buffer.end = max(buffer.end, end)
                else:
                    buffer = LiveRange(value.bytes, spans[at][0], end, value)
                    self.buffers.append(buffer)
                memory[id(value)] = buffer
            if operation.name in _TURNED and (turned := _transposed_array(operation, needs)):
                other = memory.get(id(needs.base(turned)))
                until = other.end if inside and other is not None else spans[place + 1][1]
                self.buffers.append(LiveRange(turned.bytes, spans[place][0], until, turned))

        self._delay_scatters(block, needs, memory, spans)
        if inside:
            self._extend_overlapped(block, needs, memory, spans, len(carried))

    def _extend_overlapped(
        self,
        block: OperationBlock,
        needs: LivenessInfo,
        memory: dict[int, LiveRange],
        spans: list[tuple[int, int]],
        carried: int,
    ) -> None:
        """Extend collectives that overlap with an iteration's other work: gathers begin with the iteration,
        scatters end with the next one."""
        ready, results = {id(value) for value in block.inputs}, needs.results(carried)
        for operation in block.operations:
            if all(id(needs.base(v)) in ready for v in operation.arrays):
                if operation.name in FUSED or operation.name in SAME_MEMORY:
                    ready |= {id(v) for v in operation.outputs}
                elif operation.name == "all_gather" and (buffer := memory.get(id(operation.outputs[0]))) is not None:
                    buffer.start = min(buffer.start, spans[0][0])
            if (
                operation.name == "reduce_scatter"
                and id(operation.outputs[0]) in results
                and needs.has_only_result_readers(operation)
            ):
                operand = needs.base(operation.arrays[0])
                buffer, maker = memory.get(id(operand)), needs.makers.get(id(operand))
                if buffer is not None and maker is not None and not maker.blocks:
                    # Scattered during the next iteration, while that computes its own.
                    buffer.end = spans[-1][1]
                    self.buffers.append(LiveRange(buffer.bytes, spans[0][0], spans[-1][1], buffer.value))

    def _delay_scatters(
        self, block: OperationBlock, needs: LivenessInfo, memory: dict[int, LiveRange], spans: list[tuple[int, int]]
    ) -> None:
        """Delay scatters of a loop's result: a scatter that nothing waits for runs after the loops that follow."""
        for place, operation in enumerate(block.operations):
            if operation.name != "reduce_scatter":
                continue
            operand = needs.base(operation.arrays[0])
            buffer, maker = memory.get(id(operand)), needs.makers.get(id(operand))
            if maker is None or not maker.blocks:
                continue
            first = needs.first_read(operation.outputs[0], place)
            loops = [i for i in range(place, min(first, len(block.operations))) if block.operations[i].name == "scan"]
            if buffer is not None and loops:
                buffer.end = max(buffer.end, spans[loops[-1]][1])

    @staticmethod
    def _reusable_operand(
        operation: Operation, number: int, value: Value, free: list[Value], needs: LivenessInfo
    ) -> Value | None:
        """Return the operand with memory that a result reuses; None if it needs separate memory."""
        if operation.blocks:
            first, count = _carried(operation)
            operand = operation.inputs[first + number] if number < count and operation.name != "cond" else None
            base = None if operand is None else needs.base(operand)
            return base if base in free else None
        if operation.name == "ragged_all_to_all":
            # Rows are received into the array that they are scattered into.
            base = needs.base(operation.arrays[1])
            return base if base in free else None
        if operation.name not in FUSED and operation.name not in IN_PLACE_OPS:
            return None
        return next((v for v in free if v.bytes == value.bytes), None)


def _transposed_array(operation: Operation, needs: LivenessInfo) -> Value | None:
    """Return the array that a collective along another dimension than the first has to transpose, since it
    works along the first."""
    gathered = operation.name == "all_gather"
    full_array = operation.outputs[0] if gathered else operation.arrays[0]
    dim = gathered_dim(operation.eqn) if gathered else scattered_dim(operation.eqn)
    if math.prod(full_array.shape[:dim]) == 1:
        return None
    beside = needs.readers.get(id(full_array), []) if gathered else [needs.makers.get(id(needs.base(full_array)))]
    alike = (other is not None and _in_any_order(other, full_array, dim, needs) for other in beside)
    return None if all(alike) else full_array


def _in_any_order(operation: Operation, value: Value, dim: int, needs: LivenessInfo) -> bool:
    """Return True if an operation can read or produce a value with a dimension moved to the front, at no
    cost.

    A matrix multiplication can if the dimension and each of those before it are on different sides of its
    matrices.
    """
    if operation.name != "dot_general":
        return operation.name in FUSED or operation.name == "scatter-add"
    (left, right), (left_batch, right_batch) = contracted_dims(operation.eqn)
    operands = [v for v in operation.inputs if v is not None and needs.base(v) is needs.base(value)]
    if not operands:
        sides = [
            len(operand_shape(operation, number)) - len(summed) - len(left_batch)
            for number, summed in enumerate((left, right))
        ]
        groups = [0] * len(left_batch) + [1] * sides[0] + [2] * sides[1]
    else:
        first = operands[0] is operation.inputs[0]
        summed, batch = (left, left_batch) if first else (right, right_batch)
        groups = [1 if d in summed else 0 if d in batch else 2 for d in range(len(value.shape))]
    if len(groups) != len(value.shape):
        return False
    return all(value.shape[d] == 1 or groups[d] != groups[dim] for d in range(dim))


def _carried(operation: Operation) -> tuple[int, int]:
    """Return (index of the first carried value among a loop's operands and its body's inputs; number of
    carried values)."""
    if operation.name == "scan":
        return scan_arity(operation.eqn)
    if operation.name == "while":
        first = sum(while_arity(operation.eqn))
        return first, len(operation.inputs) - first
    return 0, 0
