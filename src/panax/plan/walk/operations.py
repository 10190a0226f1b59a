"""Computation of a traced step: the FLOPs of its matrix multiplications, and the bytes that its operations
read and write."""

import dataclasses
import math
from collections.abc import Callable

from ...core.jax_primitives import contracted_dims, dimension_numbers, foreign_target, read_kernel
from ...kernels.cost import lookup_cost
from .program import ALIASES, Operation, OperationBlock, operand_shape, read_block
from .trip_counts import count_executions

_FOREIGN = "ffi_call"
"""The primitive of calls into foreign code."""

_CALLED_BACK = frozenset({"pure_callback", "io_callback", "custom_call", "tpu_custom_call", "triton_kernel_call"})


@dataclasses.dataclass(frozen=True)
class StepWork:
    """Work of one device in a step.

    Attributes:
        flops: FLOPs of matrix multiplications, factorizations, convolutions and kernels; two for each
            multiplication with its addition.
        touched_bytes: Bytes read and written if each operation ran separately; compilers fuse most of them.
        unknown: Kernels without a declared cost: `flops` is then a lower bound.
    """

    flops: float
    touched_bytes: float
    unknown: tuple[str, ...]


def measure_work(program: OperationBlock) -> StepWork:
    """Compute the work of a program."""
    total, touched, unknown = 0.0, 0.0, {}
    for operation, times in count_executions(program):
        flops, touched = operation_flops(operation), touched + bytes_touched(operation) * times.expected
        if flops is None:
            unknown[_name(operation)] = None
        else:
            total += float(flops) * times.expected
    return StepWork(total, touched, tuple(unknown))


def operation_flops(operation: Operation) -> float | None:
    """Return the FLOPs of one execution; 0.0 if it is not a matrix multiplication, None if unknown."""
    counted = _COUNTED.get(operation.name)
    if counted is not None:
        return counted(operation)
    cost = lookup_cost(_name(operation))
    if cost is not None:
        inputs = [value for value in operation.inputs if value is not None]
        return cost(inputs, operation.outputs, operation.params) * (
            operation.outputs[0].share if operation.outputs else 1
        )
    return None if operation.name == _FOREIGN or operation.name in _CALLED_BACK else 0.0


def _name(operation: Operation) -> str:
    return foreign_target(operation.eqn) if operation.name == _FOREIGN else operation.name


def _dot(operation: Operation) -> float:
    (left, _), _ = contracted_dims(operation.eqn)
    shape = operand_shape(operation, 0)
    return 2.0 * operation.outputs[0].elements * operation.outputs[0].share * math.prod(shape[dim] for dim in left)


def _convolution(operation: Operation) -> float:
    numbers = dimension_numbers(operation.eqn)
    kernel = operand_shape(operation, 1)
    each = math.prod(kernel) // kernel[numbers.rhs_spec[0]]
    return 2.0 * operation.outputs[0].elements * operation.outputs[0].share * each


def _ragged(operation: Operation) -> float:
    return 2.0 * math.prod(operand_shape(operation, 0)) * operand_shape(operation, 1)[-1]


def _pallas(operation: Operation) -> float | None:
    """Count the FLOPs of the kernel's body, once for each point of its grid: an upper bound, since a kernel
    skips masked blocks."""
    kernel = read_kernel(operation.eqn)
    if kernel.flops is not None:
        return kernel.flops
    found = measure_work(read_block(kernel.jaxpr))
    return None if found.unknown else found.flops * math.prod(kernel.grid)


def _factorised(times: float) -> Callable[[Operation], float]:
    """Return a function that counts a factorization of square matrices: `times` the cube of the side (Golub
    and Van Loan, Matrix Computations)."""

    def counted(operation: Operation) -> float:
        *stack, _, side = operand_shape(operation, 0)
        return times * math.prod(stack) * side**3

    return counted


_COUNTED = {
    # Orthogonal factors, formed: 4/3 for the factorization and the same for its vectors. Eigenvectors: 9.
    "qr": _factorised(8 / 3),
    "eigh": _factorised(9.0),
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "ragged_dot": _ragged,
    "ragged_dot_general": _ragged,
    "pallas_call": _pallas,
}


def bytes_touched(operation: Operation) -> int:
    """Return the bytes read and written by one execution, if each operation ran separately."""
    if operation.name in ALIASES:
        return 0
    return sum(value.bytes for value in [*operation.arrays, *operation.outputs])
