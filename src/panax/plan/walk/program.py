"""A traced step as a small program: each device's operations, their loops, and the sizes of their arrays.

A jaxpr is read with its calls inlined, without dead code, and with common subexpressions of a block merged,
as compilers do. Inside a `shard_map` arrays are local to a device; outside they are global, and each has the
share of it that a device holds.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.jax_primitives import (
    REMATERIALIZED,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    called_jaxpr,
    cond_branches,
    eliminate_dead_code,
    is_shard_map,
    open_jaxpr,
    read_shard_map,
    scan_arity,
    scan_body,
    scan_length,
    while_body,
    while_condition,
)

_NAMES_ONLY = ("name", "spmd_mark", "stop_gradient")
"""Primitives that annotate their operands and do nothing."""

_ROUNDED = ("dot_general", "conv_general_dilated")

ALIASES = frozenset({"again", "part", "whole"})
"""Operations of this module that only give a name to memory: a recomputation reads its operands by other
names; `part` is a device's part of a whole array, `whole` the inverse."""


@dataclasses.dataclass(eq=False)
class Value:
    """An array on one device.

    Attributes:
        shape: Shape of the local array inside a `shard_map`, of the global array outside.
        share: Share of `shape` that the device holds; 1.0 inside.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    share: float = 1.0

    @classmethod
    def of(cls, aval: Any, share: float = 1.0) -> "Value":
        dtype = aval.dtype
        if jnp.issubdtype(dtype, jax.dtypes.extended):
            # A key: two words
            return cls((*aval.shape, 2), np.dtype(np.uint32), share)
        return cls(tuple(aval.shape), np.dtype(dtype), share)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return round(self.elements * self.dtype.itemsize * self.share)


@dataclasses.dataclass(eq=False)
class Operation:
    """One primitive, or a loop or a conditional with its blocks.

    Attributes:
        inputs: Operands; None for a constant.
        scope: Named scopes of the user's program, outermost first.
        blocks: The body of a `scan`; the condition and body of a `while`; the branches of a `cond`.
        eqn: Its equation in the trace.
    """

    name: str
    inputs: list[Value | None]
    outputs: list[Value]
    params: dict[str, Any]
    scope: str
    eqn: JaxprEqn
    blocks: tuple["OperationBlock", ...] = ()

    @property
    def arrays(self) -> list[Value]:
        """Return the operands that are not constants."""
        return [value for value in self.inputs if value is not None]


@dataclasses.dataclass(eq=False)
class OperationBlock:
    """Operations in the order in which they were traced."""

    inputs: list[Value]
    operations: list[Operation]
    outputs: list[Value | None]

    def walk(self) -> Iterator[Operation]:
        """Yield all operations, those of inner blocks after the operation that contains them."""
        for operation in self.operations:
            yield operation
            for block in operation.blocks:
                yield from block.walk()


def read_program(closed: ClosedJaxpr, shares: Sequence[float] | None = None) -> OperationBlock:
    """Read a traced function as an `OperationBlock`.

    Args:
        shares: Share of each argument that a device holds; None: all of it.
    """
    jaxpr = eliminate_dead_code(closed)
    inputs = [Value.of(v.aval, 1.0 if shares is None else shares[i]) for i, v in enumerate(jaxpr.invars)]
    reader = _Reader()
    outputs = reader.run(jaxpr, [*map(_constant, jaxpr.constvars), *inputs], "")
    return OperationBlock(inputs, _read_by(outputs, reader.operations), outputs)


def operand_shape(operation: Operation, number: int) -> tuple[int, ...]:
    """Return the shape of an operand, including constants."""
    aval: Any = operation.eqn.invars[number].aval
    return tuple(aval.shape)


class _Reader:
    """Reader of one block; equal operations on the same operands are merged."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.known: dict[Any, list[Value]] = {}

    def run(self, jaxpr: Jaxpr, arguments: Sequence[Value | None], scope: str) -> list[Value | None]:
        values: dict[Any, Value | None] = dict(zip([*jaxpr.constvars, *jaxpr.invars], arguments))
        for eqn in jaxpr.eqns:
            inputs = [None if isinstance(atom, Literal) else values[atom] for atom in eqn.invars]
            own = str(eqn.source_info.name_stack)
            outputs = self.equation(eqn, inputs, f"{scope}/{own}" if scope and own else scope or own)
            values.update(zip(eqn.outvars, outputs))
        return [None if isinstance(atom, Literal) else values[atom] for atom in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, inputs: list[Value | None], scope: str) -> Sequence[Value | None]:
        name = eqn.primitive.name
        if name in _NAMES_ONLY:
            return inputs
        if name == "scan" and scan_length(eqn) == 1:
            return self.once(eqn, inputs, scope)
        jaxpr = read_shard_map(eqn).jaxpr if is_shard_map(eqn) else called_jaxpr(eqn)
        if jaxpr is None:
            results, blocks = [_result(var.aval, inputs) for var in eqn.outvars], _blocks(eqn, scope)
            if name == "scan":
                inputs = _read_in(blocks[0], inputs, *scan_arity(eqn))
            return self.add(eqn, name, inputs, results, scope, blocks)
        if name in REMATERIALIZED:
            # Recomputed, so not merged with the earlier computation.
            inputs = [self.alias(eqn, v, v and dataclasses.replace(v), "again", scope) for v in inputs]
        if is_shard_map(eqn):
            inputs = [self.alias(eqn, v, Value.of(x.aval), "part", scope) for v, x in zip(inputs, jaxpr.invars)]
        outputs = self.run(jaxpr, [*map(_constant, jaxpr.constvars), *inputs], scope)
        if is_shard_map(eqn):
            outputs = [self.alias(eqn, v, _whole(v, x.aval), "whole", scope) for v, x in zip(outputs, eqn.outvars)]
        return outputs

    def once(self, eqn: JaxprEqn, inputs: list[Value | None], scope: str) -> Sequence[Value | None]:
        """Inline a loop of one iteration, as compilers do: unread parts of it are then not computed."""
        body, (consts, carried) = scan_body(eqn), scan_arity(eqn)
        constants = consts + carried
        of_turn = [
            self.alias(eqn, v, Value.of(x.aval), "part", scope)
            for v, x in zip(inputs[constants:], body.invars[constants:])
        ]
        outputs = self.run(body, [*map(_constant, body.constvars), *inputs[:constants], *of_turn], scope)
        stacked = zip(outputs[carried:], eqn.outvars[carried:])
        return [*outputs[:carried], *(self.alias(eqn, v, Value.of(x.aval), "whole", scope) for v, x in stacked)]

    def alias(self, eqn: JaxprEqn, value: Value | None, other: Value | None, name: str, scope: str) -> Value | None:
        """Add `other` as an alias of the memory of `value`."""
        return None if value is None or other is None else self.add(eqn, name, [value], [other], scope)[0]

    def add(
        self,
        eqn: JaxprEqn,
        name: str,
        inputs: list[Value | None],
        outputs: list[Value],
        scope: str,
        blocks: tuple[OperationBlock, ...] = (),
    ) -> list[Value]:
        key = None if blocks or name in ALIASES else _key(eqn, inputs)
        if key is not None and key in self.known:
            return self.known[key]
        self.operations.append(Operation(name, inputs, outputs, eqn.params, scope, eqn, blocks))
        if key is not None:
            self.known[key] = outputs
        return outputs


def _constant(var: Any) -> Value:
    return Value.of(var.aval)


def _read_in(body: OperationBlock, inputs: list[Value | None], constants: int, carried: int) -> list[Value | None]:
    """Return a loop's operands, without those that its body neither reads nor carries."""
    read = {id(v) for operation in body.operations for v in operation.inputs} | {id(v) for v in body.outputs}
    read |= {id(v) for v in body.inputs[constants : constants + carried]}
    return [v if id(own) in read else None for v, own in zip(inputs, body.inputs)]


def _blocks(eqn: JaxprEqn, scope: str) -> tuple[OperationBlock, ...]:
    """Return the bodies of a loop, or the branches of a conditional."""
    name = eqn.primitive.name
    if name == "scan":
        bodies = (scan_body(eqn),)
    elif name == "while":
        bodies = (while_condition(eqn), while_body(eqn))
    else:
        bodies = cond_branches(eqn) if name == "cond" else ()
    return tuple(read_block(one, scope) for one in bodies)


def read_block(program: ClosedJaxpr | Jaxpr, scope: str = "") -> OperationBlock:
    """Read a jaxpr of local arrays, such as a loop's body."""
    jaxpr = open_jaxpr(program)
    reader, inputs = _Reader(), [Value.of(v.aval) for v in jaxpr.invars]
    outputs = reader.run(jaxpr, [*map(_constant, jaxpr.constvars), *inputs], scope)
    return OperationBlock(inputs, _read_by(outputs, reader.operations), outputs)


def _read_by(outputs: Sequence[Value | None], operations: list[Operation]) -> list[Operation]:
    """Return the operations that the outputs depend on."""
    read, dependencies = {id(value) for value in outputs}, []
    for operation in reversed(operations):
        if any(id(value) in read for value in operation.outputs):
            if operation.name == "psum":
                # Of several arrays in one operation, those that are read.
                pairs = [pair for pair in zip(operation.inputs, operation.outputs) if id(pair[1]) in read]
                operation.inputs, operation.outputs = (list(each) for each in zip(*pairs))
            read |= {id(value) for value in operation.inputs}
            dependencies.append(operation)
    return _as_compiled(dependencies[::-1], outputs)


def _as_compiled(operations: list[Operation], outputs: Sequence[Value | None]) -> list[Operation]:
    """Apply two optimizations of every compiler: a matrix multiplication writes its sums rounded, if nothing
    else reads them; and sums that are each scattered, and then added, are added first and scattered once."""
    readers: dict[int, int] = {}
    for value in (*outputs, *(v for operation in operations for v in operation.inputs)):
        readers[id(value)] = readers.get(id(value), 0) + 1
    makers: dict[int, Operation] = {}
    compiled_operations: dict[int, Operation] = {}
    for operation in operations:
        before = [makers.get(id(v)) for v in operation.inputs if readers.get(id(v)) == 1]
        first = before[0] if before else None
        if operation.name == "convert_element_type" and first is not None and first.name in _ROUNDED:
            first.outputs = operation.outputs
            operation = first
        elif operation.name in ("add", "add_any") and first is not None and _scattered_alike(before):
            addends = [value for one in before if one is not None for value in one.arrays]
            for one in before:
                del compiled_operations[id(one)]
            full_sum = dataclasses.replace(operation, inputs=list(addends), outputs=[dataclasses.replace(addends[0])])
            compiled_operations[id(full_sum)] = full_sum
            operation = dataclasses.replace(first, inputs=list(full_sum.outputs), outputs=operation.outputs)
        compiled_operations[id(operation)] = operation
        makers.update((id(value), operation) for value in operation.outputs)
    return list(compiled_operations.values())


def _scattered_alike(operations: Sequence[Operation | None]) -> bool:
    if len(operations) != 2:
        return False
    left, right = operations
    if left is None or right is None or left.name != "reduce_scatter" or right.name != "reduce_scatter":
        return False
    return left.params == right.params and len(left.arrays) == len(right.arrays) == 1


def _result(aval: Any, inputs: Sequence[Value | None]) -> Value:
    """Return an operation's result: outside a `shard_map`, laid out like an operand of its size."""
    value = Value.of(aval)
    alike = [v.share for v in inputs if v is not None and v.share < 1.0 and v.elements == value.elements]
    return dataclasses.replace(value, share=min(alike, default=1.0)) if alike else value


def _whole(part: Value | None, aval: Any) -> Value | None:
    whole = Value.of(aval)
    return None if part is None else dataclasses.replace(whole, share=part.elements / max(whole.elements, 1))


def _key(eqn: JaxprEqn, inputs: Sequence[Value | None]) -> Any:
    """Return a key that is equal for operations with the same result; None if that can't be determined."""
    read = [
        (str(atom.val), str(atom.aval)) if isinstance(atom, Literal) else id(value)
        for atom, value in zip(eqn.invars, inputs)
    ]
    key = (eqn.primitive, *read, *eqn.params.items(), *(var.aval for var in eqn.outvars))
    try:
        hash(key)
    except TypeError:
        return None
    return key
