"""Rules for contractions, reductions, and reads and writes at computed indices.

A sum over a split dimension produces a term of the sum over the whole dimension. Integers are exempt: counts
of a device's rows say where its rows are, and are rarely added up over devices.
"""

from typing import Any

import jax.numpy as jnp

from ...core.jax_primitives import contracted_dims, dimension_numbers, foreign_target, reduced_dims, slice_sizes
from .shapes import drop_dims
from .states import (
    LONE,
    PARTIAL,
    UNKNOWN,
    ZERO,
    AxisState,
    Kind,
    Part,
    combine_states,
    first_wrong,
    sharded_state,
    wrong_state,
)
from .values import FIXED, Rule, States, infer_nonlinear, infer_unknown


def infer_reduction(equation: Any, states: States) -> AxisState:
    (state,) = states
    if state.kind is not Kind.SPLIT or not state.dims:
        return state
    result, shape = _summed(equation, drop_dims(reduced_dims(equation), state)), equation.invars[0].aval.shape
    return LONE if result is PARTIAL and all(shape[dim] == 1 for dim in state.dims) else result


def _summed(equation: Any, remaining: set[Part]) -> AxisState:
    """Return the state of a sum over split dimensions, of which the parts `remaining` are left."""
    if remaining or not jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.inexact):
        return sharded_state(remaining, equation)
    return PARTIAL


def infer_extreme(equation: Any, states: States) -> AxisState | list[AxisState]:
    (state,) = states
    if state.kind is Kind.PARTIAL:
        return infer_nonlinear(equation, states)
    if state.kind is not Kind.SPLIT or not state.dims:
        return state
    return sharded_state(drop_dims(reduced_dims(equation), state), equation)


def infer_contraction(equation: Any, states: States) -> AxisState:
    """Infer the state of a `dot_general`."""
    (left_sum, right_sum), (left_batch, right_batch) = contracted_dims(equation)
    ranks = [len(operand.aval.shape) for operand in equation.invars[:2]]
    return contract_states(
        equation, states, (tuple(left_sum), tuple(right_sum)), (tuple(left_batch), tuple(right_batch)), ranks
    )


def contract_states(equation: Any, states: States, summed: Any, batch: Any, ranks: Any) -> AxisState:
    """Infer the state of a contraction of the first two operands.

    Args:
        summed: For each operand, the contracted dimensions.
        batch: For each operand, the batch dimensions.
        ranks: The operands' numbers of dimensions.
    """
    left, right = states[:2]
    error_state = first_wrong((left, right))
    if error_state is not None:
        return error_state
    if Kind.ZERO in (left.kind, right.kind):
        return ZERO
    if Kind.PARTIAL in (left.kind, right.kind):
        factor, term = (right, left) if left.kind is Kind.PARTIAL else (left, right)
        if factor.kind in FIXED:
            return term
        if factor.kind is Kind.UNKNOWN:
            return UNKNOWN
        return wrong_state(
            equation,
            "multiplies a partial sum over devices by a value that differs between them; reduce it first",
        )
    if not (left.dims or right.dims):
        return combine_states((left, right))
    if UNKNOWN in (left, right):
        return UNKNOWN
    # The result's dimensions are the batch's, then the left operand's others, then the right's. If a sharded
    # dimension is contracted, the result is a partial sum over its devices.
    parts: set[Part] = set()
    over = False
    free = len(batch[0])
    for side, state in enumerate((left, right)):
        over = over or any(dim in summed[side] for dim in state.dims)
        rest = [dim for dim in range(ranks[side]) if dim not in summed[side] and dim not in batch[side]]
        place = {dim: number for number, dim in enumerate(batch[side])}
        place |= {dim: free + number for number, dim in enumerate(rest)}
        parts |= state.move_dims(place.get)
        free += len(rest)
    return _summed(equation, parts) if over else sharded_state(parts, equation)


def infer_slice(equation: Any, states: States) -> AxisState:
    operand, *places = states
    error_state = first_wrong(states)
    if error_state is not None or all(place.kind in FIXED for place in places):
        return error_state or operand
    if operand.kind in (Kind.ZERO, Kind.PARTIAL, Kind.UNKNOWN):
        return operand
    before, after = equation.invars[0].aval.shape, slice_sizes(equation)
    moved = {dim for dim, place in enumerate(places) if place.kind not in FIXED and after[dim] < before[dim]}
    if operand.kind is Kind.SPLIT:
        # Rows that each device reads within the split dimension stay split along it; otherwise the devices'
        # results are unrelated.
        return operand if moved <= operand.dims else sharded_state((), equation)
    return sharded_state(moved, equation)


def infer_slice_update(equation: Any, states: States) -> AxisState:
    """Infer the state of an array after a slice is written into it."""
    operand, update, *places = states
    error_state = first_wrong(states)
    if error_state is not None:
        return error_state
    live = [state for state in (operand, update) if state.kind is not Kind.ZERO]
    if not live:
        return ZERO
    if any(state.kind is Kind.PARTIAL for state in live):
        return PARTIAL if all(state.kind is Kind.PARTIAL for state in live) else _mixed(equation, live)
    return combine_states([*live, *(sharded_state(()) for place in places if place.kind not in FIXED)])


def _mixed(equation: Any, live: list[AxisState]) -> AxisState:
    if any(state.kind is Kind.UNKNOWN for state in live):
        return UNKNOWN
    return wrong_state(equation, "writes a partial sum over devices next to complete values; reduce it first")


def infer_gather(equation: Any, states: States) -> AxisState:
    """Infer the state of rows of an array read by index."""
    operand, numbers = states[:2]
    error_state = first_wrong((operand, numbers))
    if error_state is not None:
        return error_state
    if operand.kind is Kind.ZERO:
        return ZERO
    if numbers.kind is Kind.PARTIAL or (operand.kind is Kind.PARTIAL and numbers.kind not in FIXED):
        return infer_nonlinear(equation, (operand, numbers))
    if operand.kind is Kind.PARTIAL or (operand.kind in FIXED and numbers.kind in FIXED):
        return operand if operand.kind is Kind.PARTIAL else combine_states((operand, numbers))
    if UNKNOWN in (operand, numbers):
        return UNKNOWN
    dim_numbers = dimension_numbers(equation)
    rank = len(equation.outvars[0].aval.shape)
    batch = [dim for dim in range(rank) if dim not in dim_numbers.offset_dims]
    removed = (*dim_numbers.collapsed_slice_dims, *dim_numbers.operand_batching_dims)
    remaining = [dim for dim in range(len(equation.invars[0].aval.shape)) if dim not in removed]
    place = dict(zip(remaining, dim_numbers.offset_dims))
    for dim, along in zip(dim_numbers.operand_batching_dims, dim_numbers.start_indices_batching_dims):
        place[dim] = batch[along]
    return sharded_state(numbers.move_dims(dict(enumerate(batch)).get) | operand.move_dims(place.get), equation)


def infer_scatter(equation: Any, states: States) -> AxisState:
    """Infer the state of an array after rows are written, or added, at computed indices."""
    operand, numbers, updates = states[:3]
    error_state = first_wrong((operand, numbers, updates))
    if error_state is not None:
        return error_state
    if PARTIAL in (numbers, updates) or operand.kind is Kind.PARTIAL:
        terms = [state for state in (operand, updates) if state.kind is not Kind.ZERO]
        if numbers.kind is Kind.PARTIAL:
            return infer_nonlinear(equation, (numbers,))
        if operand.kind is not Kind.PARTIAL or updates.kind is Kind.PARTIAL or updates.kind is Kind.ZERO:
            return PARTIAL if all(state.kind is Kind.PARTIAL for state in terms) else _mixed(equation, terms)
    if UNKNOWN in (operand, numbers, updates):
        return UNKNOWN
    if operand.kind is Kind.ZERO and updates.kind is Kind.ZERO:
        return ZERO
    if numbers.kind in FIXED and updates.kind in FIXED:
        return combine_states((operand, numbers, updates)) if operand.kind is not Kind.SPLIT else operand
    adds = equation.primitive.name == "scatter-add"
    places, window = _places(equation, numbers, updates)
    # Each device adds its own updates: the result is a term of the sum over devices.
    if places and not window and adds:
        term = _summed(equation, set())
        live = [state for state in (operand, term) if state.kind is not Kind.ZERO]
        if term.kind is Kind.PARTIAL:
            return PARTIAL if all(state.kind is Kind.PARTIAL for state in live) else _mixed(equation, live)
        return combine_states((operand, term))
    dim_numbers = dimension_numbers(equation)
    # Otherwise the result is split where the windows are, and where rows written by index land.
    into = set(dim_numbers.scatter_dims_to_operand_dims) if places and not adds else set()
    into = {int(dim) for dim in window | into}
    return combine_states((operand, sharded_state(into, equation))) if operand.kind is not Kind.PARTIAL else operand


def _places(equation: Any, numbers: AxisState, updates: AxisState) -> tuple[set[int], set[int]]:
    """Return the split dimensions of the updates that enumerate indices, and the operand's split window
    dimensions.
    """
    dim_numbers = dimension_numbers(equation)
    rank = len(equation.invars[2].aval.shape)
    batch = [dim for dim in range(rank) if dim not in dim_numbers.update_window_dims]
    dims = updates.dims | {batch[dim] for dim in numbers.dims if dim < len(batch)}
    removed = (*dim_numbers.inserted_window_dims, *dim_numbers.operand_batching_dims)
    remaining = [dim for dim in range(len(equation.invars[0].aval.shape)) if dim not in removed]
    window = {
        remaining[dim_numbers.update_window_dims.index(dim)] for dim in dims if dim in dim_numbers.update_window_dims
    }
    together_ = {
        batch[along]: dim
        for dim, along in zip(dim_numbers.operand_batching_dims, dim_numbers.scatter_indices_batching_dims)
    }
    window |= {together_[dim] for dim in dims if dim in together_}
    places = {dim for dim in dims if dim not in dim_numbers.update_window_dims and dim not in together_}
    return places, window


def infer_foreign(equation: Any, states: States) -> AxisState | list[AxisState]:
    """Infer the state of a custom call by one of Panax's CPU kernels."""
    target = foreign_target(equation)
    if target.startswith("panax_product_"):
        first, second = target.removeprefix("panax_product_")
        summed = ((0 if first == "t" else 1,), (1 if second == "t" else 0,))
        return contract_states(equation, states, summed, ((), ()), (2, 2))
    if target == "panax_wall":
        return states[0]
    return [infer_unknown(equation, states)] * len(equation.outvars)


RULES: dict[str, Rule] = {
    "reduce_sum": infer_reduction,
    **dict.fromkeys(
        ("reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor", "reduce_prod", "argmax", "argmin"),
        infer_extreme,
    ),
    "dot_general": infer_contraction,
    "dynamic_slice": infer_slice,
    "dynamic_update_slice": infer_slice_update,
    "gather": infer_gather,
    **dict.fromkeys(("scatter-add", "scatter"), infer_scatter),
    "ffi_call": infer_foreign,
}
