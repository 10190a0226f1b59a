"""A simulation as a page: the main result first, then curves over the interval and over the number of
devices, and the assumptions."""

import dataclasses
import math
import os
from pathlib import Path

from ...core.errors import DataError
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
from ...metrics.page.html import page
from ...metrics.page.lines import Line, line_chart
from ...metrics.report.charts import HEIGHT, WIDTH, kind_color
from ...metrics.report.formats import format_duration, format_percent
from .fleet import SECONDS_PER_DAY
from .model import FEWER_DEVICES, Forecast, best_every, forecast
from .simulation import COUNTS, Simulation
from .terminal import SHOWN_KINDS, advice, describe_interval, describe_theory, list_stage_times

MAX_POINTS = 60
FEWER_COLOR = 5


def write_page(found: Simulation, output: str | Path) -> Path:
    """Write the page.

    Raises:
        DataError: The page can't be written.
    """
    place = Path(output)
    beside = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        beside.write_text(page(_title(found), sections_of(found)), encoding="utf-8", errors="replace")
        os.replace(beside, place)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise DataError(
            f"can't write the page to {place}: {error.strerror or error}; give another file as output"
        ) from error
    return place


def _title(found: Simulation) -> str:
    of = f" of {Path(found.run).name}" if found.run else ""
    return f"Goodput{of} on {found.fleet.devices:,} devices"


def sections_of(found: Simulation) -> list[Section]:
    """Return all sections of the page, in order."""
    return [
        Section("", (Paragraph(advice(found), lead=True), _tiles(found), _strips(found))),
        Section("How often to save, on how many devices", (Grid((*_by_interval(found), _by_devices(found))),)),
        Section("Numbers of devices", (_table_of_devices(found),)),
        Section("Intervals", (_table_of_intervals(found),)),
        Section("Stage times", (TextTable((("stage", "time", "from"), *list_stage_times(found))),)),
        Section("Assumed", (Points(found.assumptions),)),
    ]


def _tiles(found: Simulation) -> FigureTiles:
    now, best, lives = found.now, found.best, found.lives
    between = now.seconds_between_failures
    tone = "good" if now.goodput >= 0.9 else "busy" if now.advances else "bad"
    spread = f"{format_percent(lives.low)} to {format_percent(lives.high)} in nine of ten lives"
    return FigureTiles(
        (
            Tile("Goodput", format_percent(now.goodput), spread if now.advances else "the run never advances", tone),
            Tile("At the best interval", format_percent(best.goodput), describe_interval(best)),
            Tile(
                "Interval by theory", describe_theory(found) if math.isfinite(found.theory) else "—", "Young and Daly"
            ),
            Tile("ETTR", format_percent(now.ettr), "the run makes progress"),
            Tile("Failures", f"{now.failures_per_day:.3g}", "a day"),
            Tile("Between failures", format_duration(between) or "—", "on average"),
            Tile(
                "A failure costs",
                format_duration(now.recovery + now.lost_per_failure, brief=True),
                "recovery and lost work",
            ),
        )
    )


def _colour(kind: str) -> int:
    return FEWER_COLOR if kind == FEWER_DEVICES else kind_color(kind)


def _strips(found: Simulation) -> Block:
    kinds = [kind for kind in SHOWN_KINDS if found.now.shares.get(kind, 0) > 0 or found.best.shares.get(kind, 0) > 0]
    strips = tuple(
        Strip(
            title,
            tuple(
                StripSegment(each.shares[kind], _colour(kind), f"{kind}: {format_percent(each.shares[kind])}")
                for kind in kinds
                if each.shares.get(kind, 0) > 0
            ),
            f"goodput {format_percent(each.goodput)}, {describe_interval(each)}",
        )
        for title, each in (("Now", found.now), ("At the best interval", found.best))
    )
    return Strips(
        strips, tuple((_colour(kind), kind, format_percent(found.now.shares.get(kind, 0.0))) for kind in kinds)
    )


def _by_interval(found: Simulation) -> tuple[Picture, Picture]:
    stages, fleet = found.stages, found.fleet
    unit = stages.copy_every or 1
    most = max(int((fleet.days * SECONDS_PER_DAY - stages.stall) / (unit * stages.step_with_waits)), 1)
    low, high = max(found.best.every / unit / 10, 1), min(max(found.best.every, stages.every) / unit * 3, most)
    counts = sorted({round(low * (max(high, low) / low) ** (n / MAX_POINTS)) for n in range(MAX_POINTS + 1)})
    made = [forecast(dataclasses.replace(stages, every=count * unit), fleet) for count in counts]
    minutes = [each.interval / 60 for each in made]
    below = f"minutes between checkpoints, on {fleet.devices:,} devices"
    lost = [
        Line(kind, minutes, [100 * each.shares[kind] for each in made], marked=False)
        for kind in ("lost work", "checkpoint wait")
    ]
    goodput = [
        Line("goodput", minutes, [100 * each.goodput for each in made], marked=False),
        *(
            Line(word, [at.interval / 60], [100 * at.goodput])
            for word, at in (("now", found.now), ("best", found.best))
        ),
    ]
    return (
        _picture("Goodput by interval, %", goodput, below),
        _picture("Cost of the interval, % of the time", lost, below),
    )


def _by_devices(found: Simulation) -> Picture:
    host, most = found.fleet.devices_per_host, max(COUNTS[-1], found.fleet.devices)
    least = 2 * host
    counts = sorted(
        {max(round(least * (most / least) ** (n / MAX_POINTS) / host), 2) * host for n in range(MAX_POINTS + 1)}
    )
    now: list[Forecast] = []
    best: list[Forecast] = []
    for count in counts:
        fleet = dataclasses.replace(found.fleet, devices=count)
        now.append(forecast(found.stages, fleet))
        best.append(forecast(dataclasses.replace(found.stages, every=best_every(found.stages, fleet)), fleet))
    lines = [
        Line(title, counts, [100 * each.goodput for each in made], marked=False)
        for title, made in (("at the present interval", now), ("at the best for each", best))
    ]
    lines.append(Line("now", [found.fleet.devices], [100 * found.now.goodput]))
    return _picture("Goodput by number of devices, %", lines, "devices")


def _picture(title: str, lines: list[Line], below: str) -> Picture:
    drawn = line_chart(lines, below, logarithmic_x=True, width=WIDTH, height=HEIGHT, titles_above=True, readable=True)
    return Picture(title, drawn.svg, title=title)


def _table_of_devices(found: Simulation) -> TextTable:
    rows: list[tuple[str, ...]] = [
        ("devices", "failures a day", "between failures", "goodput", "best goodput", "best interval")
    ]
    marked = None
    for now, best in found.by_devices:
        if now.devices == found.fleet.devices:
            marked = len(rows) - 1
        between = format_duration(now.seconds_between_failures)
        interval = describe_interval(best) if best.advances else "none: it never advances"
        rows.append(
            (
                f"{now.devices:,}",
                f"{now.failures_per_day:.3g}",
                between,
                format_percent(now.goodput),
                format_percent(best.goodput),
                interval,
            )
        )
    return TextTable(tuple(rows), marked=marked)


def _table_of_intervals(found: Simulation) -> TextTable:
    rows: list[tuple[str, ...]] = [("checkpoint every", "steps", "goodput", "checkpoint wait", "lost work", "")]
    marked = None
    for each in found.by_interval:
        notes = [word for word, at in (("now", found.now), ("best", found.best)) if at.every == each.every]
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
