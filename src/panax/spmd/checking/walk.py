"""Inference of states through one device's program along one mesh axis, from a `shard_map`'s inputs to its
results.

A value in a wrong state is not yet an error: it may never be read, or a mark after trusted code may correct
it. It is reported where it reaches a result or a checked mark, with the equation at which it went wrong.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ...core.jax_primitives import (
    Jaxpr,
    Literal,
    called_jaxpr,
    collective_axes,
    cond_branches,
    open_jaxpr,
    scan_arity,
    scan_body,
    while_arity,
    while_body,
    while_condition,
)
from ..sharding_marks import mark_p, read_mark
from . import sums, values
from .collective_rules import COLLECTIVE_RULES, infer_mark
from .states import (
    CONSTANT,
    UNKNOWN,
    WHOLE,
    ZERO,
    AxisState,
    Kind,
    combine_states,
    describe_state,
    join_states,
    sharded_state,
)
from .values import FIXED, infer_unknown

RULES = values.RULES | sums.RULES
MAX_ROUNDS = 12
"""Maximum passes over a loop's body until its carry is stable; states only increase, so few are needed."""


class ShardingFinding(NamedTuple):
    """A value in a wrong state.

    Attributes:
        what: Name of the value, for messages.
        reason: What is wrong with it.
        axis: The mesh axis.
        source: The equation that produced it.
    """

    what: str
    reason: str
    axis: str
    source: Any


class Walk:
    """Inference over one program along one mesh axis.

    Attributes:
        findings: By the id of the equation at which they were found.
    """

    def __init__(self, axis: str):
        self.axis = axis
        self.findings: dict[int, ShardingFinding] = {}
        self._known: dict[tuple[int, tuple[AxisState, ...]], list[AxisState]] = {}
        # Held so that no other jaxpr can be given the id of a cached one.
        self._held: list[Any] = []

    def run(self, program: Any, states: Sequence[AxisState]) -> list[AxisState]:
        """Return the states of a jaxpr's results; cached by jaxpr and input states."""
        jaxpr = open_jaxpr(program)
        key = (id(jaxpr), tuple(states))
        cached = self._known.get(key)
        if cached is None:
            cached = self._known[key] = self._run(jaxpr, states)
            self._held.append(jaxpr)
        return cached

    def _run(self, jaxpr: Jaxpr, states: Sequence[AxisState]) -> list[AxisState]:
        known: dict[Any, AxisState] = dict.fromkeys(jaxpr.constvars, CONSTANT)
        known.update(zip(jaxpr.invars, states))
        producers: dict[Any, Any] = {}
        for equation in jaxpr.eqns:
            operands = [_literal(v) if isinstance(v, Literal) else known[v] for v in equation.invars]
            if equation.primitive is mark_p:
                results = self._marked(equation, operands, producers)
            else:
                results = self._equation(equation, operands)
            for variable, state in zip(equation.outvars, results):
                known[variable] = state
                producers[variable] = equation
        return [_literal(v) if isinstance(v, Literal) else known[v] for v in jaxpr.outvars]

    def _marked(self, equation: Any, operands: list[AxisState], producers: dict[Any, Any]) -> list[AxisState]:
        state, reason = infer_mark(equation, operands, self.axis)
        mark = read_mark(equation)
        if reason and mark is not None:
            source = operands[0].source or producers.get(equation.invars[0])
            self.findings[id(equation)] = ShardingFinding(mark.label, reason, self.axis, source)
        return [state]

    def _equation(self, equation: Any, operands: list[AxisState]) -> Sequence[AxisState]:
        name = equation.primitive.name
        if name in COLLECTIVE_RULES:
            if self.axis in collective_axes(equation):
                return [COLLECTIVE_RULES[name](equation, state) for state in operands]
            extreme = name in ("pmax", "pmin")
            return [
                values.infer_nonlinear(equation, [s]) if extreme and s.kind is Kind.PARTIAL else s for s in operands
            ]
        if name == "axis_index":
            return [sharded_state((), equation) if self.axis in collective_axes(equation) else CONSTANT]
        if name in CONTROL_RULES:
            return CONTROL_RULES[name](self, equation, operands)
        called = called_jaxpr(equation)
        if called is not None:
            return self.run(called, operands)
        rule = RULES.get(name, infer_unknown)
        result = rule(equation, operands)
        return [result] * len(equation.outvars) if isinstance(result, AxisState) else result

    def _scan(self, equation: Any, operands: list[AxisState]) -> list[AxisState]:
        body, (consts, carries) = scan_body(equation), scan_arity(equation)
        fixed, carry, stacked = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]
        rows = [_moved(state, -1) for state in stacked]

        def once(carry: Sequence[AxisState]) -> tuple[Sequence[AxisState], Sequence[AxisState]]:
            results = self.run(body, [*fixed, *carry, *rows])
            return results[:carries], results[carries:]

        carry, others = self._iterate_to_fixed_point(once, carry, equation)
        return [*carry, *(_moved(state, 1) for state in others)]

    def _while(self, equation: Any, operands: list[AxisState]) -> list[AxisState]:
        condition, body, (first, second) = while_condition(equation), while_body(equation), while_arity(equation)
        of_test, of_body, carry = operands[:first], operands[first : first + second], operands[first + second :]

        def once(carry: Sequence[AxisState]) -> tuple[Sequence[AxisState], Sequence[AxisState]]:
            return self.run(body, [*of_body, *carry]), ()

        carry, _ = self._iterate_to_fixed_point(once, carry, equation)
        (test,) = self.run(condition, [*of_test, *carry])
        return [_chosen(test, state, equation) for state in carry]

    def _iterate_to_fixed_point(
        self, once: Any, carry: Sequence[AxisState], equation: Any
    ) -> tuple[list[AxisState], Sequence[AxisState]]:
        """Iterate a loop's body until the states of its carry no longer change."""
        latest, others = list(carry), ()
        for _ in range(MAX_ROUNDS):
            after, others = once(latest)
            following = [join_states(old, new, equation) for old, new in zip(latest, after)]
            if following == latest:
                return latest, others
            latest = following
        return [UNKNOWN if state.kind not in FIXED else state for state in latest], others

    def _cond(self, equation: Any, operands: list[AxisState]) -> list[AxisState]:
        test, *rest = operands
        results: list[AxisState] | None = None
        for branch in cond_branches(equation):
            found = self.run(branch, rest)
            results = found if results is None else [join_states(a, b, equation) for a, b in zip(results, found)]
        return [_chosen(test, state, equation) for state in results or []]


CONTROL_RULES = {"scan": Walk._scan, "while": Walk._while, "cond": Walk._cond}


def _literal(literal: Any) -> AxisState:
    value = literal.val
    return ZERO if getattr(value, "ndim", 0) == 0 and not isinstance(value, bool) and value == 0 else CONSTANT


def _moved(state: AxisState, by: int) -> AxisState:
    """Return the state of a row of a stacked value (`by` = -1), or of a stack of rows (1)."""
    if state.kind is not Kind.SPLIT or not state.dims:
        return state
    parts = state.move_dims(lambda dim: dim + by if dim + by >= 0 else None)
    return sharded_state(parts) if parts else UNKNOWN


def _chosen(test: AxisState, state: AxisState, equation: Any) -> AxisState:
    """Return the state of a branch's or loop's result that depends on the condition `test`."""
    if test.kind in FIXED or state.kind in (Kind.ZERO, Kind.UNKNOWN, Kind.WRONG):
        return state
    if test.kind is Kind.WRONG:
        return test
    return UNKNOWN if state.kind is Kind.PARTIAL else combine_states((state, sharded_state((), equation)))


def input_states(jaxpr: Jaxpr, specs: Sequence[Any], axis: str) -> Iterator[AxisState]:
    """Yield the states of a `shard_map`'s inputs."""
    for spec in specs:
        dims = [dim for dim, names in enumerate(spec) if axis in _names(names)]
        yield sharded_state(dims) if dims else WHOLE


def wrong_results(
    states: Sequence[AxisState], specs: Sequence[Any], axis: str, jaxpr: Jaxpr
) -> Iterator[ShardingFinding]:
    """Yield the results with states that do not match a `shard_map`'s specs."""
    producers: dict[Any, Any] = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    for number, (state, spec) in enumerate(zip(states, specs)):
        if state.kind is Kind.WRONG:
            yield ShardingFinding(f"result {number}", state.reason, axis, state.source)
        elif not any(axis in _names(names) for names in spec) and state.kind in (Kind.SPLIT, Kind.PARTIAL):
            reason = f"should be equal on every device, and is {describe_state(state)}; reduce it, or gather it"
            yield ShardingFinding(
                f"result {number}", reason, axis, state.source or producers.get(jaxpr.outvars[number])
            )


def _names(names: Any) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)
