"""Cost of reaching the same held-out loss: steps, samples, time and price of each run."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import RecipeError
from ...core.finite_stats import min_finite
from ...system.terminal_text import align_columns
from ..goodput import IDLE
from .costs import compute_device_hours
from .figures import HELD_OUT, speed_curves
from .formats import format_duration, format_hours, format_loss, format_money
from .run_files import RunFiles
from .writer import read_runs

SECONDS_PER_STEP = "seconds/step"


@dataclasses.dataclass(frozen=True)
class LossTarget:
    """Progress of a run to a loss.

    Attributes:
        step: Steps to the first evaluation at or below the loss, or between two of them if interpolated; None
            if the run never reached it.
        loss: Loss of that evaluation; otherwise the lowest of the run, None if it was never evaluated.
        unit: Unit of samples: "tokens", "images", "examples".
        units: Number of samples in these steps.
        seconds: From the run's beginning until then, with starts, evaluations, saves and lost steps; without
            idle time. For a run without a ledger, its steps alone.
        device_hours: Devices times that time; None if their number is unknown.
        cost: Cost of the device-hours, if a price was given.
        note: Remark for the reader.
    """

    name: str
    folder: str
    step: float | int | None
    loss: float | int | None
    unit: str = ""
    units: float | int | None = None
    seconds: float | int | None = None
    device_hours: float | int | None = None
    cost: float | int | None = None
    note: str = ""


def time_to_loss(
    *runs: str | Path, loss: float | int, price_per_hour: float | int | None = None, interpolate: bool = False
) -> tuple[LossTarget, ...]:
    """Compute what each run needed to reach a held-out loss, from the files in its folder.

    Args:
        runs: Their folders, as `runs/NAME`.
        loss: Held-out loss, as the runs report it.
        price_per_hour: Price of an hour of one device; None: no costs.
        interpolate: Assume that the loss falls linearly between the last evaluation above and the first one
            at or below; by default the step of the latter counts.

    Raises:
        RecipeError: The loss, the price or the list of runs is invalid.
        DataError: A folder is not a run's.
    """
    if not math.isfinite(loss):
        raise RecipeError(f"until_loss={loss}; expected a held-out loss: a finite number, as in --until-loss 3.2")
    if price_per_hour is not None and not (math.isfinite(price_per_hour) and price_per_hour > 0):
        raise RecipeError(
            f"price_per_hour={price_per_hour}; expected the price of an hour of one device: a number above 0, as in "
            f"--price-per-hour 2.5"
        )
    return tuple(_reached(run, loss, price_per_hour, interpolate) for run in read_runs(runs))


def _reached(run: RunFiles, loss: float | int, price: float | int | None, interpolate: bool) -> LossTarget:
    evaluated = [(step, value) for step, value in _curve(run, HELD_OUT) if math.isfinite(value)]
    target = LossTarget(run.name, str(run.folder), None, min_finite((value for _, value in evaluated), default=None))
    if not evaluated:
        return dataclasses.replace(target, note="never evaluated: set evaluate.every, and give held-out data")
    at = next((n for n, (_, value) in enumerate(evaluated) if value <= loss), None)
    if at is None:
        lowest, where = min_finite((value, step) for step, value in evaluated)
        ends = ", and it continues" if run.alive else ""
        return dataclasses.replace(target, note=f"not reached: {lowest:.4f} at best, at step {where:,.0f}{ends}")
    step, value = evaluated[at]
    notes = []
    if at == 0:
        notes.append("by its first evaluation")
    elif interpolate:
        before, above = evaluated[at - 1]
        step = before + (step - before) * (above - loss) / (above - value)
    unit, units = _units_in(run, step)
    seconds, device_hours = _time_to(run, step)
    if seconds is not None and run.life is None:
        notes.append("time of the steps alone: there is no goodput.jsonl")
    cost = None if price is None or device_hours is None else price * device_hours
    return dataclasses.replace(
        target, step=step, loss=value, unit=unit, units=units, seconds=seconds, device_hours=device_hours, cost=cost,
        note="; ".join(notes),
    )  # fmt: skip


def _curve(run: RunFiles, name: str) -> list[tuple[float | int, float | int]]:
    curve = run.curves.get(name)
    return [] if curve is None else list(zip(curve.x, curve.y))


def _units_in(run: RunFiles, step: float | int) -> tuple[str, float | int | None]:
    """Return (unit, number of samples in the first steps)."""
    seconds = dict(_curve(run, SECONDS_PER_STEP))
    for unit, curve in speed_curves(run):
        # Their product is the mean number in a step since the previous line.
        each = [(x, y * seconds[x]) for x, y in zip(curve.x, curve.y) if math.isfinite(y * seconds.get(x, math.nan))]
        if not each:
            continue
        ends = [x for x, _ in each]
        total = sum((min(x, step) - before) * per for before, (x, per) in zip([0.0, *ends], each) if before < step)
        return unit, total + max(step - ends[-1], 0.0) * each[-1][1]
    return "", None


def _time_to(run: RunFiles, step: float | int) -> tuple[float | int | None, float | int | None]:
    """Return (seconds, device-hours) from a run's beginning until a step was taken."""
    if run.times is None:
        return None, None
    passed = float(run.times.at([step])[0])
    if run.life is None:
        return passed, None
    until = run.life.sessions[0].began + passed
    spans = tuple((kind, begin, min(end, until)) for kind, begin, end in run.life.spans if begin < until)
    cut = dataclasses.replace(run, life=dataclasses.replace(run.life, spans=spans))
    spent = compute_device_hours(cut)
    seconds = sum(end - begin for kind, begin, end in spans if kind != IDLE)
    return seconds, None if spent is None else float(spent.total)


def format_time_to_loss(targets: Sequence[LossTarget], loss: float | int, currency: str = "USD") -> list[str]:
    """Format a table for a terminal, with a row for each run; then the remarks on runs."""
    units = {each.unit for each in targets if each.unit}
    priced = any(each.cost is not None for each in targets)
    rows = [["run", f"steps to {loss:g}", *(units if len(units) == 1 else ["samples"]), "time", "device-hours", "loss"]]
    for each in targets:
        counted = "" if each.units is None else f"{each.units:,.0f}" + (f" {each.unit}" if len(units) > 1 else "")
        steps = "" if each.step is None else f"{each.step:,.0f}"
        row = [steps, counted, format_duration(each.seconds), format_hours(each.device_hours), format_loss(each.loss)]
        rows.append([each.name, *(cell or "—" for cell in row)])
    if priced:
        costs = ["—" if each.cost is None else format_money(each.cost, currency) for each in targets]
        rows = [[*row[:-1], cost, row[-1]] for row, cost in zip(rows, ["cost", *costs])]
    lines = align_columns(rows)
    notes = [f"{each.name}: {each.note}" for each in targets if each.note]
    return [*lines, *([""] if notes else []), *notes]
