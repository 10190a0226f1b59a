"""Values of a block that are materialized, and the last reader of each."""

from collections.abc import Sequence

from .program import ALIASES, Operation, OperationBlock, Value

_SAME = """
    reshape squeeze expand_dims optimization_barrier sharding_constraint pvary transpose
"""
_ELEMENTWISE = """
    abs acos add add_any and argmax argmin atan2 axis_index bitcast_convert_type broadcast_in_dim cbrt ceil clamp complex
    concatenate conj convert_element_type copy cos cosh cumsum div dynamic_slice dynamic_update_slice eq erf erf_inv exp exp2
    expm1 floor gather ge gt imag integer_pow iota is_finite le log log1p logistic lt max min mul ne neg nextafter not or pad
    pow random_bits random_fold_in random_wrap random_unwrap real reduce_precision rem rev round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice split sqrt square sub tan tanh xor
"""
_REDUCTIONS = "reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_prod argmax argmin"

SAME_MEMORY = ALIASES | frozenset(_SAME.split())
"""Operations that return their operand's memory, with another shape or order at most."""

FUSED, REDUCED = frozenset(_ELEMENTWISE.split()), frozenset(_REDUCTIONS.split())
IN_PLACE_OPS = frozenset({"dynamic_update_slice", "scatter", "scatter-add"})


class LivenessInfo:
    """Values of a block that have memory, and the last operation that reads each."""

    def __init__(self, block: OperationBlock):
        self.block = block
        self.origin: dict[int, Value] = {}
        for operation in block.operations:
            if operation.name in SAME_MEMORY:
                for operand, result in zip(operation.arrays, operation.outputs):
                    self.origin[id(result)] = self.base(operand)
        self.makers = {id(value): operation for operation in block.operations for value in operation.outputs}
        self.readers: dict[int, list[Operation]] = {}
        for operation in block.operations:
            if operation.name not in SAME_MEMORY:
                for value in operation.arrays:
                    self.readers.setdefault(id(self.base(value)), []).append(operation)
        self.written = self._written()
        self._sources: dict[int, dict[int, Value]] = {}
        for operation in block.operations:
            unwritten = [value for value in operation.outputs if id(value) not in self.written]
            if unwritten and operation.name not in SAME_MEMORY:
                self._sources |= {id(value): {id(v): v for v in self.sources(operation)} for value in unwritten}
        self.read = self._last_reads()

    def base(self, value: Value) -> Value:
        """Return the value that owns the memory of `value`: an alias has its origin's."""
        return self.origin.get(id(value), value)

    def sources(self, operation: Operation) -> list[Value]:
        """Return the values in memory that an operation reads: its operands, and those of operations fused
        into it."""
        bases: dict[int, Value] = {}
        for value in operation.arrays:
            base = self.base(value)
            maker = self.makers.get(id(base))
            if id(base) in self.written or maker is None:
                bases[id(base)] = base
            elif id(base) in self._sources:
                bases |= self._sources[id(base)]
        return list(bases.values())

    def first_readers(self) -> dict[int, int]:
        """Return the index of the first operation that reads each value, by any alias."""
        first: dict[int, int] = {}
        for number, operation in enumerate(self.block.operations):
            if operation.name not in SAME_MEMORY:
                for value in operation.arrays:
                    first.setdefault(id(self.base(value)), number)
        return first

    def first_read(self, value: Value, place: int) -> int:
        """Return the index of the first operation after `place`, other than fused ones, that reads a value;
        past the end if there is none."""
        reached = {id(value)}
        for later in range(place + 1, len(self.block.operations)):
            operation = self.block.operations[later]
            if any(id(v) in reached for v in operation.arrays):
                if operation.name not in FUSED and operation.name not in SAME_MEMORY:
                    return later
                reached |= {id(v) for v in operation.outputs}
        return len(self.block.operations)

    def results(self, carried: int) -> set[int]:
        """Return the values that are results of each iteration, after those that it carries, or are fused
        into one."""
        result_ids = {id(self.base(value)) for value in self.block.outputs[carried:] if value is not None}
        for operation in reversed(self.block.operations):
            if (operation.name in FUSED or operation.name in SAME_MEMORY) and any(
                id(v) in result_ids for v in operation.outputs
            ):
                result_ids |= {id(value) for value in operation.arrays}
        return result_ids

    def has_only_result_readers(self, operation: Operation) -> bool:
        """Return True if nothing in the block waits for the result of an operation."""
        return self.first_read(operation.outputs[0], self.block.operations.index(operation)) == len(
            self.block.operations
        )

    def accumulated_products(self, carried: Sequence[Value]) -> list[Value]:
        """Return matrix multiplications that are added to a loop's carry in the single operation that
        compilers make of both."""
        products = []
        for old, new in zip(carried, self.block.outputs):
            maker = None if new is None else self.makers.get(id(self.base(new)))
            if maker is not None and maker.name in ("add", "add_any"):
                others = [self.base(v) for v in maker.arrays if self.base(v) is not old]
                if len(others) == 1 and (of := self.makers.get(id(others[0]))) is not None and of.name == "dot_general":
                    products += others
        return products

    def _written(self) -> set[int]:
        """Return the inputs, and the values read or made by operations other than fused ones."""
        written_ids = {id(value) for value in self.block.inputs}
        for operation in self.block.operations:
            if operation.name in SAME_MEMORY:
                continue
            if operation.name not in FUSED | REDUCED or operation.name in IN_PLACE_OPS:
                written_ids |= {id(self.base(value)) for value in operation.arrays}
            if operation.name not in FUSED or operation.name in IN_PLACE_OPS:
                written_ids |= {id(value) for value in operation.outputs}
        return written_ids | {id(self.base(value)) for value in self.block.outputs if value is not None}

    def _last_reads(self) -> dict[int, int]:
        """Return the last reader of each value: a fused operation reads at the position of its reader."""
        end = len(self.block.operations)
        read = {id(self.base(v)): end for v in self.block.outputs if v is not None}
        for place in range(end - 1, -1, -1):
            operation = self.block.operations[place]
            if operation.name in SAME_MEMORY:
                continue
            fused = all(id(value) not in self.written for value in operation.outputs)
            at = max((read.get(id(value), place) for value in operation.outputs), default=place) if fused else place
            for value in operation.arrays:
                base = id(self.base(value))
                read[base] = max(read.get(base, -1), at)
        return read
