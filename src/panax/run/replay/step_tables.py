"""An opened step as rows of text, for a terminal and a page."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...train.taps.module_outputs import ModuleOutput
from ...train.taps.origin import FaultOrigin
from ...train.taps.program_tree import StepPhase
from ...train.taps.statistics import ArrayStatistics
from .row_shares import RowShares
from .tables_format import figure, percent
from .what_if import ChangedStep

if TYPE_CHECKING:
    from .step_view import ParameterFacts, StepView

Rows = tuple[tuple[str, ...], ...]

STATISTICS = ("total norm", "rms", "least", "most", "zeros", "not finite")


def _statistics(each: ArrayStatistics) -> tuple[str, ...]:
    return (
        figure(each.norm), figure(each.rms), figure(each.low), figure(each.high), percent(each.zeros), percent(each.not_finite)
    )  # fmt: skip


def scalar_rows(view: "StepView") -> Rows:
    """Return a step's scalars, with those recorded of it."""
    recorded = {each.name: each for each in view.replay.comparisons if each.step == view.step}
    rows = [("scalar", "replayed", "recorded", "")]
    for name, value in view.scalars.items():
        found = recorded.get(name)
        equal = "" if found is None else "equal to the bit" if found.is_equal else f"differs: {found.recorded!r}"
        rows.append((name, f"{value:.9g}", "" if found is None else f"{found.recorded:.9g}", equal))
    return tuple(rows)


def module_rows(modules: Sequence[ModuleOutput], phase: StepPhase) -> Rows:
    """Return what left each module in a phase."""
    rows: list[tuple[str, ...]] = [("module", "shape", *STATISTICS)]
    for each in modules:
        if each.phase is phase:
            times = "" if each.repeats == 1 else f" in {each.repeats} parts"
            shape = " x ".join(map(str, each.shape))
            rows.append((each.path or "(no module)", f"{shape}{times}", *_statistics(each.statistics)))
    return tuple(rows)


def parameter_rows(parameters: Sequence["ParameterFacts"]) -> Rows:
    """Return each parameter with its gradient and its update, relative to its own norm."""
    rows = [("parameter", "total norm", "gradient norm", "gradient most", "update norm", "update / norm", "not finite")]
    for each in parameters:
        gradient = each.gradient
        largest = "" if gradient is None else figure(max(abs(gradient.low), abs(gradient.high)))
        ratio = figure(each.update.norm / each.value.norm) if each.value.norm else ""
        bad = max(part.not_finite for part in (each.value, each.update, *([gradient] if gradient else [])))
        norm = "" if gradient is None else figure(gradient.norm)
        rows.append((each.name, figure(each.value.norm), norm, largest, figure(each.update.norm), ratio, percent(bad)))
    return tuple(rows)


def row_rows(shares: RowShares, max_rows: int) -> Rows:
    """Return the rows with the largest shares of the gradient, largest first."""
    order = sorted(range(len(shares.shares)), key=lambda row: -abs(shares.shares[row]))[:max_rows]
    rows = [("number", "share of gradient", "norm of its gradient", "part of loss")]
    rows += [
        (str(row), percent(shares.shares[row]), figure(shares.norms[row]), figure(shares.losses[row])) for row in order
    ]
    return tuple(rows)


def describe_rows(shares: RowShares | str) -> str:
    """Describe in one sentence how a gradient divides into rows."""
    if isinstance(shares, str):
        return f"no shares of rows: {shares}"
    if shares.is_additive:
        return (
            f"the shares of all {len(shares.shares)} rows sum to 1 within {shares.bound:.1e} ({1 - shares.coupled:.9g})"
        )
    return (
        f"the shares of all {len(shares.shares)} rows sum to {1 - shares.coupled:.6g}: {percent(shares.coupled)} of the "
        f"gradient is of no single row, since the loss reads rows together"
    )


def describe_origin(origin: FaultOrigin) -> Iterator[str]:
    """Yield lines about where the first value that is not finite came from."""
    if origin.phase is None:
        yield f"the first {origin.kind} is in an input of the step: {origin.operation}"
    else:
        module = f"in {origin.path}" if origin.path else "outside of any module"
        line = f", at {origin.line}" if origin.line else ""
        phase = {StepPhase.FORWARD: "forward", StepPhase.BACKWARD: "backward", StepPhase.RECOMPUTED: "recomputed"}.get(
            origin.phase, "update"
        )
        yield f"the first {origin.kind} came from `{origin.operation}` {module} ({phase}){line}; its operands are finite"
    if origin.through:
        yield f"it reached {origin.result} through {', '.join(origin.through)}"


def describe_taps(view: "StepView") -> str:
    """Describe whether the statistics are of the very values of the run's step."""
    if view.tapped_ulps == 0:
        return "the step with taps gives the same loss to the bit: these are the values of the step"
    if view.tapped_ulps is None:
        return "the loss is not finite, so that the step with taps can't be compared with the step"
    distance = f"within {view.tapped_ulps:,} ulp of the step's"
    return f"the step with taps is another program: its loss is {distance}; its values are of that program"


def outcome_rows(outcome: ChangedStep) -> Rows:
    """Return the scalars of a changed step beside those of the step as it was."""
    rows = [("scalar", "as it was", "changed")]
    for name, value in outcome.before.items():
        if name in outcome.after:
            rows.append((name, f"{value:.7g}", f"{outcome.after[name]:.7g}"))
    for number, (first, second) in enumerate(outcome.following, start=1):
        rows.append((f"loss {number} step{'s' if number > 1 else ''} later", f"{first:.7g}", f"{second:.7g}"))
    rows.append(("difference of the updates", "", percent(outcome.update_difference)))
    return tuple(rows)
