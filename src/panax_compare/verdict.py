"""Conclusions from the figures: a row for each column, ratios within rounds, and the fastest column,
whichever it is."""

import dataclasses
import statistics
from collections.abc import Mapping

from panax.core.finite_stats import max_finite, min_finite, sort_finite_first

from .measure.peaks import PeakRate, peak_rate
from .results import ColumnResult, Comparison
from .workload.equality import compare_losses, tolerances


@dataclasses.dataclass(frozen=True)
class ColumnFigures:
    """A column's figures.

    Attributes:
        compared: True if it has figures and does the same work, on the same device.
        remark: Reason why it is not compared, or has no figures.
        seconds: Median over the rounds.
        low: The fastest round.
        high: The slowest round.
        layout: Layout of a distributed column; empty for those of one process.
        ratio: Its step time divided by that of the fastest PyTorch column of the same layout in the same
            round: median over rounds, minimum, maximum. Below 1 it is faster.
        utilization: Model FLOPs utilization.
        others: Cores that other programs used meanwhile, mean over its turns.
    """

    name: str
    title: str
    state: str
    compared: bool
    remark: str
    layout: str = ""
    apart: float | None = None
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    per_second: float | None = None
    utilization: float | None = None
    ratio: tuple[float, float, float] | None = None
    compile_seconds: float | None = None
    first_step_seconds: float | None = None
    peak_bytes: int | None = None
    cpu_seconds: float | None = None
    others: float | None = None


def compute_rows(comparison: Comparison) -> list[ColumnFigures]:
    """Return a row for each column, in the order of the table."""
    allowed = loss_tolerances(comparison)
    peak = comparison_peak(comparison)
    plain = {name: _row(comparison, entry, allowed, peak) for name, entry in comparison.columns.items()}
    rows = []
    for name, row in plain.items():
        alike = {other: each for other, each in plain.items() if each.layout == row.layout}
        baseline = select_baseline(comparison, alike)
        if baseline is not None and row.compared and row.seconds is not None:
            row = dataclasses.replace(
                row, ratio=step_time_ratio(comparison.columns[name], comparison.columns[baseline])
            )
        rows.append(row)
    return rows


def loss_tolerances(comparison: Comparison) -> list[float]:
    """Return the maximum distance of each loss from the reference's."""
    if not comparison.reference:
        return []
    reference = comparison.columns[comparison.reference].losses
    return tolerances(reference, comparison.nudged or None, comparison.settings["precision"])


def comparison_peak(comparison: Comparison) -> PeakRate | None:
    """Return the denominator of utilization."""
    entries = list(comparison.columns.values())
    device = next((entry.device for entry in entries if entry.device), "")
    products, registers = [entry.product for entry in entries], [entry.registers for entry in entries]
    return peak_rate(device, comparison.settings["precision"], products, registers)


def select_baseline(comparison: Comparison, rows: Mapping[str, ColumnFigures]) -> str | None:
    """Return the fastest PyTorch column that does the same work; without one, the fastest of all."""
    timed = [row for row in rows.values() if row.compared and row.seconds is not None]
    torch = [row for row in timed if comparison.columns[row.name].framework == "torch"]
    fastest = min_finite(torch or timed, key=lambda row: row.seconds or 0.0, default=None)
    return None if fastest is None else fastest.name


def step_time_ratio(entry: ColumnResult, other: ColumnResult) -> tuple[float, float, float] | None:
    """Divide step times within each round that both had, which cancels the machine's load: median, minimum,
    maximum."""
    theirs = {turn["round"]: turn["seconds"] for turn in other.turns}
    ratios = [turn["seconds"] / theirs[turn["round"]] for turn in entry.turns if turn["round"] in theirs]
    return (statistics.median(ratios), min_finite(ratios), max_finite(ratios)) if ratios else None


def _row(comparison: Comparison, entry: ColumnResult, allowed: list[float], peak: PeakRate | None) -> ColumnFigures:
    same, remark, apart = _same_work(comparison, entry, allowed)
    row = ColumnFigures(entry.name, entry.title, entry.state, same, remark, entry.layout, apart)
    row = dataclasses.replace(
        row,
        compile_seconds=entry.compile_seconds,
        first_step_seconds=entry.first_step_seconds,
        peak_bytes=entry.peak_bytes,
    )
    times = entry.step_seconds
    if not times:
        return row
    seconds = statistics.median(times)
    return dataclasses.replace(
        row,
        seconds=seconds,
        low=min_finite(times),
        high=max_finite(times),
        per_second=comparison.work["units_per_step"] / seconds,
        utilization=None if peak is None else comparison.work["flops_per_step"] / seconds / peak.flops_per_second,
        cpu_seconds=statistics.median(turn["cpu_seconds"] for turn in entry.turns),
        others=statistics.mean(turn["others"] for turn in entry.turns),
    )


def _same_work(comparison: Comparison, entry: ColumnResult, allowed: list[float]) -> tuple[bool, str, float | None]:
    if not entry.losses:
        return False, entry.reason or "not measured", None
    reference = comparison.columns[comparison.reference]
    agreement = compare_losses(entry.losses, reference.losses, allowed)
    if not agreement.is_equal:
        return False, f"not the same work: {agreement.reason}", agreement.max_distance
    if _kind(entry.device) != _kind(reference.device):
        return False, f"ran on {entry.device}, the reference on {reference.device}", agreement.max_distance
    rounds = comparison.settings["rounds"]
    if entry.state == "failed":
        return (
            bool(entry.turns),
            f"{entry.reason} (after {len(entry.turns)} of {rounds} rounds)",
            agreement.max_distance,
        )
    missing = rounds - len(entry.turns)
    return True, f"{missing} of {rounds} rounds are missing" if missing > 0 else "", agreement.max_distance


def _kind(device: str) -> str:
    return "cpu" if "cpu" in device.lower() else "accelerator"


def describe_verdict(comparison: Comparison, rows: list[ColumnFigures]) -> list[str]:
    """Describe the fastest column, its lead, and the limits of this result, in sentences that hold for these
    rows."""
    compared = sort_finite_first(
        (row for row in rows if row.compared and row.seconds), key=lambda row: row.seconds or 0.0
    )
    if not compared:
        return ["No column has figures that can be compared."]
    timed = [row for row in compared if not row.layout]
    sentences = _ranking(comparison, timed)
    for layout in dict.fromkeys(row.layout for row in rows if row.layout):
        sentences += _ranking(comparison, [row for row in compared if row.layout == layout])
    panax_row = next((row for row in timed if row.name == "panax"), None)
    if panax_row is not None and panax_row is not timed[0]:
        sentences.append(f"Panax is number {timed.index(panax_row) + 1} of {len(timed)} here.")
    for row in rows:
        if row.remark.startswith("not the same work"):
            sentences.append(f"{row.title} gets no ratio: {row.remark}.")
    others = [row.others for row in compared if row.others is not None]
    if others and max_finite(others) > 0.25:
        sentences.append(
            f"Other programs used {min_finite(others):.1f} to {max_finite(others):.1f} cores during the turns: times "
            "are longer than "
            "on a quiet machine, and ratios less certain."
        )
    return sentences


def _ranking(comparison: Comparison, timed: list[ColumnFigures]) -> list[str]:
    """Describe the fastest of these rows, and how much longer the others take."""
    if not timed:
        return []
    first = timed[0]
    if len(timed) == 1:
        return [f"{first.title} alone has figures: {first.seconds:.3g} s a step; there is nothing to compare it with."]
    sentences = []
    for other in timed[1:]:
        ratio = step_time_ratio(comparison.columns[other.name], comparison.columns[first.name])
        if ratio is None:
            continue
        median, low, high = ratio
        told_apart = low > 1.0
        if other is timed[1]:
            sentences.append(
                f"{first.title} is the fastest: {first.seconds:.3g} s a step (rounds {first.low:.3g} to {first.high:.3g})."
                if told_apart
                else f"{first.title} has the lowest median, {first.seconds:.3g} s a step, but not in every round: this run "
                f"does not distinguish it from {other.title}."
            )
        # One statistic for all statements: within a round, since rounds differ. The medians of seconds may be
        # ordered differently.
        sentences.append(
            f"{other.title} takes {median:.2f} times as long as {first.title} within a round (median; {low:.2f} to {high:.2f})"
            + ("." if told_apart else ": not distinguishable.")
        )
    return sentences
