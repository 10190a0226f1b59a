"""What stands out in an opened step, with its place: the first guesses at the cause of a spike."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...train.taps.module_outputs import ModuleOutput
from ...train.taps.program_tree import StepPhase
from .row_shares import RowShares
from .tables_format import figure, percent

if TYPE_CHECKING:
    from .step_view import ParameterFacts, StepView

ROW_FACTOR = 4.0
"""A row stands out if its part of the gradient is this many times as long as the median of the others, and its share is this
many times an equal one."""

UPDATE_RATIO = 0.1
"""An update stands out if its norm is above this share of its parameter's: usual ones are near 0.001."""

GROWTH = 100.0
"""A module stands out if its output's largest value is this many times that of the module before."""

MAX_NAMED = 8
"""Maximum number of places that are named in one finding."""


def find_outliers(view: "StepView") -> tuple[str, ...]:
    """List what stands out in a step, one sentence each, most telling first; empty if nothing does.

    These are comparisons within the step, not proofs: the row with the longest gradient, the largest update, dead parts of a
    parameter, modules with values far above those before them, and values that are not finite.
    """
    return (
        *_not_finite(view.modules),
        *_rows(view.rows),
        *_updates(view.parameters),
        *_dead(view.parameters),
        *_growth(view.modules),
    )


def _not_finite(modules: Sequence[ModuleOutput]) -> Iterator[str]:
    bad = [each for each in modules if each.statistics.not_finite > 0]
    if bad:
        first = bad[0]
        kind = "activation" if first.phase is StepPhase.FORWARD else "gradient"
        share = percent(first.statistics.not_finite)
        yield f"{len(bad)} modules have values that are not finite; the first is the {kind} of {first.path}, with {share}"


def _rows(shares: RowShares | str) -> Iterator[str]:
    if isinstance(shares, str) or len(shares.norms) < 2:
        return
    for row in sorted(range(len(shares.norms)), key=lambda each: -shares.norms[each])[:MAX_NAMED]:
        others = sorted(norm for other, norm in enumerate(shares.norms) if other != row)
        usual = others[len(others) // 2]
        equal = 1 / len(shares.norms)
        if shares.norms[row] > ROW_FACTOR * usual and abs(shares.shares[row]) > ROW_FACTOR * equal:
            times = (
                f"{shares.norms[row] / usual:.3g} times the median of the others" if usual else "all others have none"
            )
            share, norm = percent(shares.shares[row]), figure(shares.norms[row])
            yield f"row {row} has {share} of the gradient: its part has norm {norm}, {times}"


def _updates(parameters: Sequence["ParameterFacts"]) -> Iterator[str]:
    ratios = [(each.update.norm / each.value.norm, each.name) for each in parameters if each.value.norm]
    large = sorted((pair for pair in ratios if pair[0] > UPDATE_RATIO), reverse=True)
    if large:
        names = ", ".join(f"{name} by {percent(ratio)}" for ratio, name in large[:MAX_NAMED])
        yield (
            f"the update changes {len(large)} of {len(parameters)} parameters by more than {percent(UPDATE_RATIO)} of their norm "
            f"({names}): the learning rate may be too high"
        )


def _dead(parameters: Sequence["ParameterFacts"]) -> Iterator[str]:
    still = [each.name for each in parameters if each.gradient is not None and each.gradient.norm == 0]
    if still:
        names = ", ".join(still[:MAX_NAMED])
        yield f"{len(still)} of {len(parameters)} parameters have a gradient of zero: {names}"
    for each in parameters:
        if each.dead and each.name not in still:
            parts = ", ".join(each.dead[:MAX_NAMED])
            more = f" and {len(each.dead) - MAX_NAMED} more" if len(each.dead) > MAX_NAMED else ""
            yield f"{each.name} has parts without gradient: {parts}{more}"


def _growth(modules: Sequence[ModuleOutput]) -> Iterator[str]:
    before = math.nan
    for each in modules:
        if each.phase is not StepPhase.FORWARD:
            continue
        largest = max(abs(each.statistics.low), abs(each.statistics.high))
        if largest > GROWTH * before > 0:
            yield f"the largest value of {each.path} is {figure(largest)}, {largest / before:.3g} times that of the module before"
        before = largest
