"""Rules for elementwise and other operations: which elements a result depends on, and whether it is linear.

A partial sum over devices stays one under linear operations. Any other operation must wait until the sum is
complete.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ...core.jax_primitives import converted_dtype
from .shapes import SHAPE_RULES
from .states import (
    CONSTANT,
    LONE,
    PARTIAL,
    UNKNOWN,
    ZERO,
    AxisState,
    Kind,
    combine_states,
    describe_state,
    first_wrong,
    sharded_state,
    wrong_state,
)

States = Sequence[AxisState]
Rule = Callable[[Any, States], "AxisState | list[AxisState]"]

FIXED = (Kind.ZERO, Kind.CONSTANT, Kind.WHOLE)


def infer_nonlinear(equation: Any, states: States) -> AxisState:
    """Infer the state if each element depends on the same element of each operand."""
    for state in states:
        if state.kind is Kind.PARTIAL:
            return wrong_state(
                equation,
                f"takes '{equation.primitive.name}' of a partial sum over devices, which is not that of the sum; reduce it first",
            )
    return combine_states(states)


def infer_unknown(equation: Any, states: States) -> AxisState:
    """Infer the state for a primitive without a rule."""
    if any(state.kind is Kind.PARTIAL for state in states):
        return wrong_state(
            equation,
            f"passes a partial sum over devices to '{equation.primitive.name}', which has no known rule; reduce it first, or "
            f"declare its result (panax.spmd.assert_sharding)",
        )
    state = combine_states(states)
    return UNKNOWN if state.kind is Kind.SPLIT else state


def infer_linear(equation: Any, states: States) -> AxisState:
    """Infer the state for an operation that is linear in its first operand and may move its dimensions.

    The other operands are indices or padding.
    """
    first, *rest = states
    if len(states) > 1:
        error_state = first_wrong(states)
        if error_state is not None:
            return error_state
        if any(state.kind not in FIXED for state in rest):
            return infer_nonlinear(equation, states)
    if first.kind is not Kind.SPLIT or not first.dims:
        return first
    move = SHAPE_RULES.get(equation.primitive.name)
    if move is None:
        return first
    parts = move(equation, first)
    # The split dimension was dropped, as can happen if each device holds one index of it; nothing is known
    # after that.
    return sharded_state(parts) if parts else UNKNOWN


def infer_convert(equation: Any, states: States) -> AxisState:
    (state,) = states
    if state.kind is Kind.PARTIAL and not jnp.issubdtype(converted_dtype(equation), jnp.inexact):
        return infer_nonlinear(equation, states)
    return state


def infer_add(equation: Any, states: States) -> AxisState:
    """Infer the state of a sum: terms stay terms, but a whole value added to a term would count once per
    device.
    """
    live = [state for state in states if state.kind is not Kind.ZERO]
    if not live:
        return ZERO
    if not any(state.kind is Kind.PARTIAL for state in live):
        return combine_states(live)
    return _of_terms(equation, live, "adds")


def _of_terms(equation: Any, live: list[AxisState], does: str) -> AxisState:
    error_state = first_wrong(live)
    if error_state is not None:
        return error_state
    other = next((state for state in live if state.kind is not Kind.PARTIAL), None)
    if other is None:
        return PARTIAL
    if other.kind is Kind.UNKNOWN:
        return UNKNOWN
    if other.kind is Kind.SPLIT and all(state is LONE for state in live if state.kind is Kind.PARTIAL):
        return combine_states([state for state in live if state.kind is not Kind.PARTIAL])
    return wrong_state(
        equation,
        f"{does} to a partial sum over devices a value that is {describe_state(other)}, which the sum then counts once per "
        f"device; add the terms up before",
    )


def infer_multiply(equation: Any, states: States) -> AxisState:
    left, right = states
    if Kind.ZERO in (left.kind, right.kind):
        return ZERO
    if left.kind is not Kind.PARTIAL and right.kind is not Kind.PARTIAL:
        return combine_states(states)
    return _scaled(equation, *((right, left) if left.kind is Kind.PARTIAL else (left, right)))


def infer_divide(equation: Any, states: States) -> AxisState:
    top, bottom = states
    if top.kind is Kind.ZERO and bottom.kind is not Kind.WRONG:
        return ZERO
    if bottom.kind is Kind.PARTIAL:
        return wrong_state(equation, "divides by a partial sum over devices, not by the sum; reduce it first")
    return _scaled(equation, bottom, top) if top.kind is Kind.PARTIAL else combine_states(states)


def _scaled(equation: Any, factor: AxisState, term: AxisState) -> AxisState:
    """Infer the state of a term times a factor that may itself be a term."""
    if factor.kind in FIXED:
        return term
    if factor.kind in (Kind.WRONG, Kind.UNKNOWN) or (term is LONE and factor.kind is Kind.SPLIT):
        return factor
    return wrong_state(
        equation,
        f"scales a partial sum over devices by a value that is {describe_state(factor)}: the sum is then not the scaled sum; "
        f"reduce it first",
    )


def infer_select(equation: Any, states: States) -> AxisState:
    by, *cases = states
    live = [state for state in cases if state.kind is not Kind.ZERO]
    if by.kind is Kind.PARTIAL:
        return infer_nonlinear(equation, states)
    if not live:
        return ZERO if by.kind is not Kind.WRONG else by
    if not any(state.kind is Kind.PARTIAL for state in live):
        return combine_states([by, *live])
    return _scaled(equation, by, _of_terms(equation, live, "puts next"))


def infer_concatenate(equation: Any, states: States) -> AxisState:
    live = [state for state in states if state.kind is not Kind.ZERO]
    if not live:
        return ZERO
    if not any(state.kind is Kind.PARTIAL for state in live):
        whole = combine_states(live)
        return infer_linear(equation, [whole])
    return _of_terms(equation, live, "puts next")


def infer_dequantized(equation: Any, states: States) -> AxisState:
    """Infer the state of a weight's value from those of its codes and scales, which are split alike."""
    return infer_linear(equation, [infer_nonlinear(equation, states)])


def infer_identity(equation: Any, states: States) -> list[AxisState]:
    return list(states)


def infer_constant(equation: Any, states: States) -> AxisState:
    return CONSTANT


def infer_zeros(equation: Any, states: States) -> AxisState:
    return ZERO


def infer_multi_result(equation: Any, states: States) -> list[AxisState]:
    """Infer the states of an operation that is linear and has several results."""
    return [infer_linear(equation, states)] * len(equation.outvars)


def infer_sort(equation: Any, states: States) -> list[AxisState]:
    return [infer_nonlinear(equation, states)] * len(equation.outvars)


_LINEAR = """
    neg name reduce_precision stop_gradient copy copy_p real imag rev slice squeeze reshape transpose broadcast_in_dim
    expand_dims tile cumsum reduce_window_sum reshard sharding_constraint pvary device_put bitcast_convert_type
"""
_NONLINEAR = """
    abs acos acosh and asin asinh atan atan2 atanh cbrt ceil clamp clz cos cosh cummax cummin cumprod cumlogsumexp
    decode_gathered digamma eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le le_to
    lgamma log log1p logistic lt lt_to max min ne nextafter not or population_count pow rem round rsqrt shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square tan tanh xor random_wrap random_unwrap
"""

RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "sub", "add_any"), infer_add),
    "mul": infer_multiply,
    "div": infer_divide,
    "select_n": infer_select,
    "convert_element_type": infer_convert,
    **dict.fromkeys(("concatenate", "pad", "stack"), infer_concatenate),
    **dict.fromkeys(_LINEAR.split(), infer_linear),
    **dict.fromkeys(("split", "unstack"), infer_multi_result),
    **dict.fromkeys(("sort", "top_k"), infer_sort),
    "dequantize_weight": infer_dequantized,
    "optimization_barrier": infer_identity,
    **dict.fromkeys(("iota", "random_seed"), infer_constant),
    **dict.fromkeys(("empty", "empty2"), infer_zeros),
    **dict.fromkeys(_NONLINEAR.split(), infer_nonlinear),
}
