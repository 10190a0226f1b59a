"""Finds a forgotten sum before a step runs: follows what each device holds of every value, through the differentiated program.

`check_program` reads the jaxpr of a traced step, and so costs no tracing. Along each mesh axis a value is whole (equal on every
device), split, partial (a term of a sum over devices) or not known. Contractions over split dimensions make terms, collectives
make them whole, linear operations keep them, and anything else is wrong for them. What a step adds up at its end must be terms;
what it hands out must be what its specs say.
"""

from collections.abc import Iterator
from typing import Any

from ...core.errors import LayoutError
from ...core.jax_primitives import ClosedJaxpr, Jaxpr, called_jaxpr, is_shard_map, open_jaxpr, read_shard_map
from ..marks import mark_p
from .lines import line_of
from .walk import ShardingFinding, Walk, inputs, wrong_results

MOST_CAUSES = 3
"""That an error lists; others are counted."""


def check_program(program: ClosedJaxpr) -> None:
    """Follow every `shard_map` of a traced program in which `check_sharding` says what is to come out.

    Raises:
        LayoutError: A value is not what it should be along a mesh axis: with the axis, the source line, and what to do.
    """
    causes: dict[tuple[str, str], list[ShardingFinding]] = {}
    for finding in findings(program):
        causes.setdefault((finding.reason, line_of(finding.source)), []).append(finding)
    if causes:
        lines = [said(found) for found in causes.values()]
        more = [f"and {len(lines) - MOST_CAUSES} more"] if len(lines) > MOST_CAUSES else []
        raise LayoutError("\n".join([*lines[:MOST_CAUSES], *more]))


def findings(program: ClosedJaxpr) -> Iterator[ShardingFinding]:
    """What is wrong, axis by axis, in the order of the program."""
    for equation in _manual_programs(open_jaxpr(program)):
        jaxpr, sizes, in_specs, out_specs = read_shard_map(equation)
        for axis, size in sizes.items():
            if size == 1:
                continue
            walk = Walk(axis)
            results = walk.run(jaxpr, list(inputs(jaxpr, in_specs, axis)))
            yield from walk.findings.values()
            if not walk.findings:
                yield from wrong_results(results, out_specs, axis, jaxpr)


def said(found: list[ShardingFinding]) -> str:
    """What was found wrong for one cause, as an error says it."""
    axes = list(dict.fromkeys(finding.axis for finding in found))
    values = list(dict.fromkeys(finding.what for finding in found))
    over = f"mesh axis {axes[0]!r}" if len(axes) == 1 else f"mesh axes {', '.join(map(repr, axes))}"
    others = f" (and {len(values) - 1} more values)" if len(values) > 1 else ""
    return f"over {over}, {values[0]}{others} {found[0].reason} [{line_of(found[0].source)}]"


def _manual_programs(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if is_shard_map(equation):
            if any(inner.primitive is mark_p for inner in read_shard_map(equation).jaxpr.eqns):
                yield equation
        elif equation.primitive.name == "jit" and (called := called_jaxpr(equation)) is not None:
            yield from _manual_programs(called)
