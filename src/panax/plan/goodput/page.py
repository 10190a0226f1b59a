"""A simulation as a page: the main result first, then curves over the interval and over the number of
devices, and the assumptions."""

import dataclasses
import math
from pathlib import Path

from ...metrics.page import html
from ...metrics.page.blocks import (
    Block,
    FigureTiles,
    Grid,
    Paragraph,
    Picture,
    Points,
    Section,
    Strip,
    Strips,
    StripSegment,
    TextTable,
    Tile,
)
from ...metrics.page.lines import ChartStyle, Line, line_chart
from ...metrics.report.charts import HEIGHT, WIDTH, kind_color
from ...metrics.report.formats import format_duration, format_percent
from .fleet import SECONDS_PER_DAY
from .model import FEWER_DEVICES, Forecast, best_every, forecast
from .prediction import COUNTS, Simulation
from .terminal import SHOWN_KINDS, advice, describe_interval, describe_theory, list_stage_times

MAX_POINTS = 60
FEWER_COLOR = 5


def write_page(simulation: Simulation, output: str | Path) -> Path:
    """Write the page.

    Raises:
        DataError: The page can't be written.
    """
    return html.write_page(output, _title(simulation), sections_of(simulation))


def _title(simulation: Simulation) -> str:
    of = f" of {Path(simulation.run).name}" if simulation.run else ""
    return f"Goodput{of} on {simulation.fleet.devices:,} devices"


def sections_of(simulation: Simulation) -> list[Section]:
    """Return all sections of the page, in order."""
    return [
        Section("", (Paragraph(advice(simulation), lead=True), _tiles(simulation), _strips(simulation))),
        Section(
            "How often to save, on how many devices", (Grid((*_by_interval(simulation), _by_devices(simulation))),)
        ),
        Section("Numbers of devices", (_table_of_devices(simulation),)),
        Section("Intervals", (_table_of_intervals(simulation),)),
        Section("Stage times", (TextTable((("stage", "time", "from"), *list_stage_times(simulation))),)),
        Section("Assumed", (Points(simulation.assumptions),)),
    ]


def _tiles(simulation: Simulation) -> FigureTiles:
    current, best, lives = simulation.now, simulation.best, simulation.lives
    between = current.seconds_between_failures
    tone = "good" if current.goodput >= 0.9 else "busy" if current.advances else "bad"
    spread = f"{format_percent(lives.low)} to {format_percent(lives.high)} in nine of ten lives"
    return FigureTiles(
        (
            Tile(
                "Goodput",
                format_percent(current.goodput),
                spread if current.advances else "the run never advances",
                tone,
            ),
            Tile("At the best interval", format_percent(best.goodput), describe_interval(best)),
            Tile(
                "Interval by theory",
                describe_theory(simulation) if math.isfinite(simulation.theory) else "—",
                "Young and Daly",
            ),
            Tile("ETTR", format_percent(current.ettr), "the run makes progress"),
            Tile("Failures", f"{current.failures_per_day:.3g}", "a day"),
            Tile("Between failures", format_duration(between) or "—", "on average"),
            Tile(
                "A failure costs",
                format_duration(current.recovery + current.lost_per_failure, brief=True),
                "recovery and lost work",
            ),
        )
    )


def _color(kind: str) -> int:
    return FEWER_COLOR if kind == FEWER_DEVICES else kind_color(kind)


def _strips(simulation: Simulation) -> Block:
    kinds = [
        kind
        for kind in SHOWN_KINDS
        if simulation.now.shares.get(kind, 0) > 0 or simulation.best.shares.get(kind, 0) > 0
    ]
    strips = tuple(
        Strip(
            title,
            tuple(
                StripSegment(each.shares[kind], _color(kind), f"{kind}: {format_percent(each.shares[kind])}")
                for kind in kinds
                if each.shares.get(kind, 0) > 0
            ),
            f"goodput {format_percent(each.goodput)}, {describe_interval(each)}",
        )
        for title, each in (("Now", simulation.now), ("At the best interval", simulation.best))
    )
    return Strips(
        strips, tuple((_color(kind), kind, format_percent(simulation.now.shares.get(kind, 0.0))) for kind in kinds)
    )


def _by_interval(simulation: Simulation) -> tuple[Picture, Picture]:
    stages, fleet = simulation.stages, simulation.fleet
    unit = stages.copy_every or 1
    max_count = max(int((fleet.days * SECONDS_PER_DAY - stages.stall) / (unit * stages.step_with_waits)), 1)
    low, high = (
        max(simulation.best.every / unit / 10, 1),
        min(max(simulation.best.every, stages.every) / unit * 3, max_count),
    )
    counts = sorted({round(low * (max(high, low) / low) ** (n / MAX_POINTS)) for n in range(MAX_POINTS + 1)})
    forecasts = [forecast(dataclasses.replace(stages, every=count * unit), fleet) for count in counts]
    minutes = [each.interval / 60 for each in forecasts]
    below = f"minutes between checkpoints, on {fleet.devices:,} devices"
    lost = [
        Line(kind, minutes, [100 * each.shares[kind] for each in forecasts], marked=False)
        for kind in ("lost work", "checkpoint wait")
    ]
    goodput = [
        Line("goodput", minutes, [100 * each.goodput for each in forecasts], marked=False),
        *(
            Line(word, [at.interval / 60], [100 * at.goodput])
            for word, at in (("now", simulation.now), ("best", simulation.best))
        ),
    ]
    return (
        _picture("Goodput by interval, %", goodput, below),
        _picture("Cost of the interval, % of the time", lost, below),
    )


def _by_devices(simulation: Simulation) -> Picture:
    host, max_devices = simulation.fleet.devices_per_host, max(COUNTS[-1], simulation.fleet.devices)
    min_devices = 2 * host
    counts = sorted(
        {
            max(round(min_devices * (max_devices / min_devices) ** (n / MAX_POINTS) / host), 2) * host
            for n in range(MAX_POINTS + 1)
        }
    )
    current: list[Forecast] = []
    best: list[Forecast] = []
    for count in counts:
        fleet = dataclasses.replace(simulation.fleet, devices=count)
        current.append(forecast(simulation.stages, fleet))
        best.append(forecast(dataclasses.replace(simulation.stages, every=best_every(simulation.stages, fleet)), fleet))
    lines = [
        Line(title, counts, [100 * each.goodput for each in forecasts], marked=False)
        for title, forecasts in (("at the present interval", current), ("at the best for each", best))
    ]
    lines.append(Line("now", [simulation.fleet.devices], [100 * simulation.now.goodput]))
    return _picture("Goodput by number of devices, %", lines, "devices")


def _picture(title: str, lines: list[Line], below: str) -> Picture:
    drawn = line_chart(
        lines, below, ChartStyle(logarithmic_x=True, width=WIDTH, height=HEIGHT, titles_above=True, readable=True)
    )
    return Picture(title, drawn.svg, title=title)


def _table_of_devices(simulation: Simulation) -> TextTable:
    rows: list[tuple[str, ...]] = [
        ("devices", "failures a day", "between failures", "goodput", "best goodput", "best interval")
    ]
    marked = None
    for current, best in simulation.by_devices:
        if current.devices == simulation.fleet.devices:
            marked = len(rows) - 1
        between = format_duration(current.seconds_between_failures)
        interval = describe_interval(best) if best.advances else "none: it never advances"
        rows.append(
            (
                f"{current.devices:,}",
                f"{current.failures_per_day:.3g}",
                between,
                format_percent(current.goodput),
                format_percent(best.goodput),
                interval,
            )
        )
    return TextTable(tuple(rows), marked=marked)


def _table_of_intervals(simulation: Simulation) -> TextTable:
    rows: list[tuple[str, ...]] = [("checkpoint every", "steps", "goodput", "checkpoint wait", "lost work", "")]
    marked = None
    for each in simulation.by_interval:
        notes = [word for word, at in (("now", simulation.now), ("best", simulation.best)) if at.every == each.every]
        if "now" in notes:
            marked = len(rows) - 1
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
    return TextTable(tuple(rows), marked=marked)
