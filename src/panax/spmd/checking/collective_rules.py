"""Inference rules for collectives and for marks."""

from collections.abc import Callable
from typing import Any

from ...core.jax_primitives import exchanged_dims, gathered_dim, is_tiled_gather, permutation_pairs, scattered_dim
from ..sharding_marks import ShardingMark, ValueState, read_mark
from .states import (
    CONSTANT,
    PARTIAL,
    UNKNOWN,
    WHOLE,
    ZERO,
    AxisState,
    Kind,
    combine_states,
    declared_state,
    describe_state,
    first_wrong,
    sharded_state,
    wrong_state,
)
from .values import FIXED, States

CollectiveRule = Callable[[Any, AxisState], AxisState]
"""(equation, state of an operand along a mesh axis that the collective uses) to the state of the result."""


def infer_psum(equation: Any, state: AxisState) -> AxisState:
    return _added_up(equation, state, WHOLE)


def infer_reduce_scatter(equation: Any, state: AxisState) -> AxisState:
    return _added_up(equation, state, sharded_state((scattered_dim(equation),)))


def _added_up(equation: Any, state: AxisState, result: AxisState) -> AxisState:
    if state.kind in (Kind.ZERO, Kind.WRONG) or (state is CONSTANT and result is WHOLE):
        return state
    if state.kind is Kind.WHOLE:
        return wrong_state(
            equation,
            "adds up a value that is equal on every device, which gives a multiple of it; remove the sum, or, for a "
            "cotangent that all devices compute alike, put split_cotangent before the loss",
        )
    if state.kind is Kind.SPLIT and state.dims:
        return wrong_state(
            equation,
            "adds up different parts of an array, element by element; gather them, or sum over their dimension first",
        )
    return result


def infer_all_gather(equation: Any, state: AxisState) -> AxisState:
    dim = gathered_dim(equation)
    if state.kind in (Kind.ZERO, Kind.CONSTANT, Kind.WRONG):
        return state
    if state.kind is Kind.PARTIAL:
        return wrong_state(equation, "gathers partial sums over devices; reduce them instead")
    if state.kind is Kind.WHOLE:
        return wrong_state(
            equation, "gathers a value that is equal on every device: the result repeats it; remove the gather"
        )
    if state.dims and dim not in state.dims and is_tiled_gather(equation):
        dims = " or ".join(map(str, sorted(state.dims)))
        return wrong_state(
            equation,
            f"gathers along dimension {dim} a value that is split along dimension {dims}; gather over the mesh axis that splits "
            f"dimension {dim}, or along dimension {dims}",
        )
    return WHOLE


def infer_max(equation: Any, state: AxisState) -> AxisState:
    if state.kind is Kind.PARTIAL:
        return wrong_state(equation, "takes an extreme of partial sums over devices; reduce them first")
    return WHOLE if state.kind in (Kind.SPLIT, Kind.UNKNOWN) else state


def infer_send(equation: Any, state: AxisState) -> AxisState:
    if state.kind is Kind.PARTIAL:
        return wrong_state(equation, "sends a partial sum to another device; reduce it first")
    return state


def infer_ppermute(equation: Any, state: AxisState) -> AxisState:
    """Return the state after a permutation. A device without a sender gets zeros, so a whole value becomes
    different.
    """
    state = infer_send(equation, state)
    senders, receivers = zip(*permutation_pairs(equation))
    return sharded_state((), equation) if state.kind is Kind.WHOLE and {*senders} != {*receivers} else state


def infer_all_to_all(equation: Any, state: AxisState) -> AxisState:
    state = infer_send(equation, state)
    if state.kind is not Kind.SPLIT and state.kind is not Kind.WHOLE:
        return state
    cut, along = exchanged_dims(equation)
    return sharded_state({*(part for part in state.parts if part[0] != along), cut})


def infer_ragged_all_to_all(equation: Any, state: AxisState) -> AxisState:
    state = infer_send(equation, state)
    return sharded_state(range(len(equation.outvars[0].aval.shape))) if state.kind is Kind.SPLIT else state


COLLECTIVE_RULES: dict[str, CollectiveRule] = {
    **dict.fromkeys(("psum", "psum_invariant", "psum2"), infer_psum),
    "reduce_scatter": infer_reduce_scatter,
    **dict.fromkeys(("all_gather", "all_gather_invariant"), infer_all_gather),
    **dict.fromkeys(("pmax", "pmin"), infer_max),
    "ppermute": infer_ppermute,
    "all_to_all": infer_all_to_all,
    "ragged_all_to_all": infer_ragged_all_to_all,
}


def infer_mark(equation: Any, states: States, axis: str) -> tuple[AxisState, str]:
    """Return (the state after a mark, the error if a checked value has a state that the mark does not allow,
    otherwise an empty text)."""
    state, *operands = states
    mark = read_mark(equation)
    if mark is None or axis not in mark.states:
        return state, ""
    if mark.mark is ShardingMark.SEGMENT_SUMS:
        return infer_segment_sums(*operands), ""
    holds = mark.states[axis]
    if mark.mark is ShardingMark.DECLARED:
        return (ZERO if state.kind is Kind.ZERO else declared_state(holds[0], mark.dim)), ""
    if mark.mark is ShardingMark.SHARED:
        return _shared(equation, state), ""
    if state.kind in (Kind.ZERO, Kind.UNKNOWN) or any(_is(state, allowed) for allowed in holds):
        return state, ""
    if state.kind is Kind.WRONG:
        return UNKNOWN, state.reason
    return UNKNOWN, _unexpected(state, [allowed.name for allowed in holds])


def infer_segment_sums(rows: AxisState, segment: AxisState) -> AxisState:
    """Infer the state of the sums of rows by segment, [segment, width], as of a scatter that adds rows to zeros."""
    error_state = first_wrong((rows, segment))
    if error_state is not None:
        return error_state
    if rows.kind in (Kind.ZERO, Kind.PARTIAL):
        return rows
    if UNKNOWN in (rows, segment):
        return UNKNOWN
    if rows.kind in FIXED and segment.kind in FIXED:
        return combine_states((rows, segment))
    if 1 in rows.dims:
        return sharded_state((1,))
    # Each device adds its own rows: a term of the sum over devices.
    return PARTIAL if 0 in rows.dims | segment.dims else sharded_state(())


def _is(state: AxisState, allowed: ValueState) -> bool:
    if state.kind is Kind.CONSTANT:
        return allowed in (ValueState.WHOLE, ValueState.PARTIAL)
    kinds = {ValueState.WHOLE: Kind.WHOLE, ValueState.PARTIAL: Kind.PARTIAL}
    return state.kind is kinds.get(allowed, Kind.SPLIT) and not (allowed is ValueState.OWN and state.dims)


def _unexpected(state: AxisState, allowed: list[str]) -> str:
    if state.kind is Kind.WHOLE and "PARTIAL" in allowed:
        return (
            "is equal on every device and will be summed over them, which gives a multiple of it; if all devices compute the "
            "same loss, apply split_cotangent first"
        )
    if state.kind is Kind.PARTIAL:
        return "is a partial sum over devices that is never reduced; reduce it (reduce_scatter_sequence, sum_over_sequence, psum)"
    return (
        f"is {describe_state(state)}, and no operation combines the devices' values; look for a lookup, a maximum or a mask of a "
        f"device's own part with results that are not summed"
    )


def _shared(equation: Any, state: AxisState) -> AxisState:
    if state.kind in (Kind.WHOLE, Kind.CONSTANT, Kind.UNKNOWN):
        return PARTIAL
    if state.kind in (Kind.ZERO, Kind.WRONG):
        return state
    return wrong_state(
        equation, f"divides among all devices a cotangent that is {describe_state(state)}; use split_cotangent once"
    )
