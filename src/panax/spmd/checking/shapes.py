"""Rules for operations that move dimensions: which dimensions of the result an operand is split along."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

from ...core.jax_primitives import broadcast_dims, read_parameter, squeezed_dims, stacked_dim, transposed_dims
from .states import AxisState, Part


def infer_reshape(equation: Any, state: AxisState) -> Iterable[Part] | None:
    """Return the parts of a split value after a reshape.

    None if they cannot be determined: a dimension of size 1 leaves no trace in the dimension that it is
    merged into.
    """
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return state.parts if before == after else _regrouped(tuple(before), tuple(after), state.parts)


@functools.lru_cache(maxsize=4096)
def _regrouped(before: tuple[int, ...], after: tuple[int, ...], parts: frozenset[Part]) -> frozenset[Part] | None:
    if 0 in before:
        return frozenset((dim, 1, 0) for dim in range(len(after)))
    # Work in elements of the flattened array: a part covers strides from `start` to `end`, and each dimension
    # of the result that overlaps with this range is split.
    spans, into = _spans(before), _spans(after)
    new_parts: set[Part] = set()
    for dim, low, high in parts:
        start, end = spans[dim] * low, spans[dim] * (high or before[dim])
        if start == end:
            alone = _of_one(dim, before, after)
            if alone is None:
                return None
            new_parts.add((alone, 1, 0))
            continue
        for to, (size, stride) in enumerate(zip(after, into)):
            first, last = max(start, stride), min(end, stride * size)
            if first < last:
                first, last = first // stride, -(-last // stride)
                new_parts.add((to, 1, 0) if first == 1 and last == size else (to, first, last))
    return frozenset(new_parts)


def _of_one(dim: int, before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
    """Return the dimension of size 1 that another one becomes, matched from the last; None if it is merged or
    dropped.
    """
    start, spans = _spans(before)[dim], _spans(after)
    ones = [to for to, (size, stride) in enumerate(zip(after, spans)) if size == 1 and stride == start]
    like = [at for at, (size, stride) in enumerate(zip(before, _spans(before))) if size == 1 and stride == start]
    behind = len(like) - like.index(dim)
    alike = len(ones) == len(like) or (len(ones) > len(like) and ones[-1] == len(ones) - 1)
    return ones[-behind] if alike else None


def _spans(shape: tuple[int, ...]) -> list[int]:
    """Return the stride of each dimension, in elements."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def drop_dims(dims: Iterable[int], state: AxisState) -> set[Part]:
    """Return the parts along the remaining dimensions, renumbered after `dims` are removed."""
    removed = frozenset(dims)
    return state.move_dims(lambda dim: None if dim in removed else dim - sum(g < dim for g in removed))


def _transposed(equation: Any, state: AxisState) -> Iterable[Part]:
    return state.move_dims(list(transposed_dims(equation)).index)


def _broadcast(equation: Any, state: AxisState) -> Iterable[Part]:
    places = broadcast_dims(equation)
    return state.move_dims(lambda dim: places[dim])


def _squeezed(equation: Any, state: AxisState) -> Iterable[Part]:
    return drop_dims(squeezed_dims(equation), state)


def _unstacked(equation: Any, state: AxisState) -> Iterable[Part]:
    return drop_dims([stacked_dim(equation)], state)


def _stacked(equation: Any, state: AxisState) -> Iterable[Part]:
    axis = stacked_dim(equation)
    return state.move_dims(lambda dim: dim + (dim >= axis))


def _resized(equation: Any, state: AxisState) -> Iterable[int | Part]:
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return [part if before[part[0]] == after[part[0]] else part[0] for part in state.parts]


def _dequantized(equation: Any, state: AxisState) -> Iterable[Part]:
    # From (*copies, *outputs, inputs) to (*copies, *inputs, *outputs); the first of the inputs is split.
    inputs = 1 + len(read_parameter(equation, "inner"))
    last = len(equation.invars[0].aval.shape) - 1
    copies = last - read_parameter(equation, "num_outputs")
    return state.move_dims(lambda dim: dim if dim < copies else copies if dim == last else dim + inputs)


SHAPE_RULES: dict[str, Callable[[Any, AxisState], Iterable[int | Part] | None]] = {
    "reshape": infer_reshape,
    "transpose": _transposed,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeezed,
    "dequantize_weight": _dequantized,
    "unstack": _unstacked,
    "stack": _stacked,
    **dict.fromkeys(("concatenate", "pad", "slice", "split", "tile"), _resized),
}
