"""Static sharding check that finds a missing or duplicate reduction before a step runs.

`check_program` reads the jaxpr of a traced step, including its backward pass, so it costs no extra tracing.
It infers the state of every value along each mesh axis: whole (equal on all devices), split, partial (a term
of a sum over devices) or unknown. Contractions of split dimensions produce partial sums, collectives make
these whole, linear operations keep them partial, and any other operation on them is an error. Values that a
step reduces at its end must be partial, and its results must match its specs.

- `states.py`: the states, and how they combine.
- `values.py`, `shapes.py`, `sums.py`: rules for operations on one device.
- `sent.py`: rules for collectives and marks.
- `walk.py`: the walk through a jaxpr and its loops and branches.
- `lines.py`: source lines for error messages.
"""

from collections.abc import Iterator
from typing import Any

from ...core.errors import LayoutError
from ...core.jax_primitives import ClosedJaxpr, Jaxpr, called_jaxpr, is_shard_map, open_jaxpr, read_shard_map
from ..sharding_marks import mark_p
from .lines import source_line
from .walk import ShardingFinding, Walk, input_states, wrong_results

MAX_CAUSES = 3
"""Maximum number of causes that an error lists; the others are counted."""


def check_program(program: ClosedJaxpr) -> None:
    """Check every `shard_map` of a traced program that contains a mark, such as one by `check_sharding`.

    Raises:
        LayoutError: A value is in the wrong state along a mesh axis; the message gives the axis, the source
            line and the fix.
    """
    causes: dict[tuple[str, str], list[ShardingFinding]] = {}
    for finding in find_problems(program):
        causes.setdefault((finding.reason, source_line(finding.source)), []).append(finding)
    if causes:
        lines = [format_finding(by_cause) for by_cause in causes.values()]
        more = [f"and {len(lines) - MAX_CAUSES} more"] if len(lines) > MAX_CAUSES else []
        raise LayoutError("\n".join([*lines[:MAX_CAUSES], *more]))


def find_problems(program: ClosedJaxpr) -> Iterator[ShardingFinding]:
    """Yield the findings, axis by axis, in program order."""
    for equation in _manual_programs(open_jaxpr(program)):
        jaxpr, sizes, in_specs, out_specs = read_shard_map(equation)
        for axis, size in sizes.items():
            if size == 1:
                continue
            walk = Walk(axis)
            results = walk.run(jaxpr, list(input_states(jaxpr, in_specs, axis)))
            yield from walk.findings.values()
            if not walk.findings:
                yield from wrong_results(results, out_specs, axis, jaxpr)


def format_finding(findings: list[ShardingFinding]) -> str:
    """Format the findings of one cause for an error message."""
    axes = list(dict.fromkeys(finding.axis for finding in findings))
    values = list(dict.fromkeys(finding.what for finding in findings))
    over = f"mesh axis {axes[0]!r}" if len(axes) == 1 else f"mesh axes {', '.join(map(repr, axes))}"
    others = f" (and {len(values) - 1} more values)" if len(values) > 1 else ""
    return f"over {over}, {values[0]}{others} {findings[0].reason} [{source_line(findings[0].source)}]"


def _manual_programs(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if is_shard_map(equation):
            if any(inner.primitive is mark_p for inner in read_shard_map(equation).jaxpr.eqns):
                yield equation
        elif equation.primitive.name == "jit" and (called := called_jaxpr(equation)) is not None:
            yield from _manual_programs(called)
