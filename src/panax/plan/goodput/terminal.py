"""A simulation as lines for a terminal of 80 columns."""

import math
import textwrap

from ...metrics.goodput import KINDS
from ...metrics.report.formats import format_duration, format_percent
from ...system.terminal_text import align_columns
from .model import FEWER_DEVICES, Forecast
from .prediction import STAGE_FIELDS, Simulation

SHOWN_KINDS = (*KINDS[:-1], FEWER_DEVICES)
STEPS = ("every", "copy_every", "measured_devices")


def format_goodput(simulation: Simulation) -> list[str]:
    """Format a simulation: the result first, then tables, then the assumptions."""
    return [
        *_answer(simulation),
        "",
        *_kinds(simulation),
        "",
        *_devices(simulation),
        "",
        *_intervals(simulation),
        "",
        *_times(simulation),
        "",
        "Assumed",
        *(line for sentence in simulation.assumptions for line in wrap_sentence(f"- {sentence}", "  ")),
    ]


def wrap_sentence(sentence: str, indent: str = "") -> list[str]:
    """Wrap a sentence in lines of at most 80 columns; flags are not broken."""
    return textwrap.wrap(sentence, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def describe_interval(prediction: Forecast) -> str:
    """Describe the interval of a forecast."""
    return (
        f"every {prediction.every:,} step{'s' if prediction.every > 1 else ''} ({format_duration(prediction.interval)})"
    )


def advice(simulation: Simulation) -> str:
    """Give advice on the interval, in a sentence."""
    current, best = simulation.now, simulation.best
    if not best.advances:
        return (
            "At this failure rate no interval lets the run advance: it fails before it commits a checkpoint. Recover faster, "
            "commit faster, use fewer devices, or keep copies in memory."
        )
    if not current.advances:
        return f"With a checkpoint {describe_interval(current)} the run never advances. Save {describe_interval(best)}."
    gain = best.goodput - current.goodput
    if best.every == current.every or gain < 5e-4:
        return f"The present interval, {describe_interval(current)}, is as good as the best."
    return f"Save {describe_interval(best)} in place of {describe_interval(current)}: {gain * 100:.2g} points more goodput."


def describe_theory(simulation: Simulation) -> str:
    """Describe the interval by theory."""
    if not math.isfinite(simulation.theory):
        return "as rarely as possible: nothing fails"
    return format_duration(simulation.theory) if simulation.theory > 0 else "after each step: a stall costs nothing"


def _answer(simulation: Simulation) -> list[str]:
    current, best, lives = simulation.now, simulation.best, simulation.lives
    between = current.seconds_between_failures
    failures = f"{current.failures_per_day:.3g} a day" + (
        f", one in {format_duration(between)}" if math.isfinite(between) else ""
    )
    spread = (
        f"{format_percent(lives.low)} to {format_percent(lives.high)} in nine of ten lives of {lives.days:.3g} days"
    )
    rows = [
        ("devices", f"{current.devices:,} for {simulation.fleet.days:g} days"),
        ("goodput", format_percent(current.goodput) + ("" if current.advances else ": the run never advances")),
        *([("simulated", spread)] if current.advances else ()),
        ("ETTR", format_percent(current.ettr)),
        ("failures", failures),
        (
            "a failure costs",
            f"{format_duration(current.recovery)} of recovery, {format_duration(current.lost_per_failure)} of lost work",
        ),
        ("checkpoints", f"{describe_interval(current)}, goodput {format_percent(current.goodput)}"),
        ("best", f"{describe_interval(best)}, goodput {format_percent(best.goodput)}" if best.advances else "none"),
        *([("by theory", describe_theory(simulation))] if best.advances else ()),
    ]
    return [*(f"{name:<16}{value}" for name, value in rows), "", *wrap_sentence(advice(simulation))]


def _kinds(simulation: Simulation) -> list[str]:
    rows = [("time goes into", "now", "at the best")]
    for kind in SHOWN_KINDS:
        current, best = (each.shares.get(kind, 0.0) for each in (simulation.now, simulation.best))
        if current > 0 or best > 0:
            rows.append((kind, format_percent(current), format_percent(best)))
    return align_columns(rows)


def _devices(simulation: Simulation) -> list[str]:
    rows = [("devices", "failures/day", "goodput", "best goodput", "best interval")]
    for current, best in simulation.by_devices:
        rows.append(
            (
                f"{current.devices:,}",
                f"{current.failures_per_day:.3g}",
                format_percent(current.goodput),
                format_percent(best.goodput),
                format_duration(best.interval) if best.advances else "none",
            )
        )
    return align_columns(rows)


def _intervals(simulation: Simulation) -> list[str]:
    rows = [("checkpoint every", "steps", "goodput", "waiting", "lost work", "")]
    for each in simulation.by_interval:
        notes = [word for word, at in (("now", simulation.now), ("best", simulation.best)) if at.every == each.every]
        waiting, lost = format_percent(each.shares["checkpoint wait"]), format_percent(each.shares["lost work"])
        rows.append(
            (
                format_duration(each.interval),
                f"{each.every:,}",
                format_percent(each.goodput),
                waiting,
                lost,
                ", ".join(notes),
            )
        )
    return align_columns(rows)


def _times(simulation: Simulation) -> list[str]:
    return align_columns(
        [("stage", "time", "from"), *((*row[:2], row[2]) for row in list_stage_times(simulation))], left=(0, 2)
    )


def list_stage_times(simulation: Simulation) -> list[tuple[str, str, str]]:
    """Return (stage, its time, its source) for each stage time that was used."""
    rows = []
    for name in STAGE_FIELDS:
        if name in simulation.sources:
            value = getattr(simulation.stages, name)
            text = f"{value:,}" if name in STEPS else format_duration(value)
            unit = {"every": " steps", "copy_every": " steps"}.get(name, "")
            rows.append((name.replace("_", " "), text + unit, simulation.sources[name]))
    return rows
