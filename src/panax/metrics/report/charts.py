"""Drawings of a run's page: strips of the use of time, and curves."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from panax.core.finite_stats import max_finite

from ..goodput import IDLE
from ..page.blocks import Annotation, Picture, Strip, StripSegment
from ..page.lines import ChartStyle, Line, line_chart
from ..page.svg import number, ticks
from .figures import HELD_OUT, LOSS, MEMORY, MFU, RunFigures, speed_curves
from .formats import format_duration, format_percent, format_time
from .incidents import RunIncident
from .run_files import RunFiles

KINDS = {
    "training": 2,
    "start": 5,
    "compile": 8,
    "data wait": 4,
    "checkpoint wait": 7,
    "evaluation": 3,
    "lost work": 1,
    "restart": 6,
    IDLE: -1,
}
"""Kinds of a run's time, in the order of the bar, each with the index of its color."""

OTHER_COLOR = 6
WIDTH, HEIGHT = 460, 240
MAX_TOTAL_POINTS = 900
"""Number of points shared by the lines of one chart."""

UNITS = ((2 * 86400.0, 86400.0, "days"), (2 * 3600.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


class ChartSpec(NamedTuple):
    """A chart: the names of its curves with their labels, and the factor of its values."""

    title: str
    names: tuple[tuple[str, str], ...]
    scale: float | int = 1.0
    logarithmic_beyond: float | int | None = None
    """The ratio of greatest to least value that makes the axis logarithmic; None: never."""


def select_charts(runs: Sequence[RunFiles], *, apart: bool) -> list[ChartSpec]:
    """Return the charts for the logged values of these runs.

    Args:
        apart: Training and evaluation are separate charts, so that each line is a run.
    """
    known = {name for run in runs for name in run.curves}
    units = list(dict.fromkeys(unit for run in runs for unit, _ in speed_curves(run)))
    pairs = [("Loss", (LOSS, HELD_OUT), 8.0), ("Accuracy", ("train/accuracy", "evaluation/accuracy"), None)]
    charts: list[ChartSpec] = []
    for title, names, beyond in pairs:
        called = [(name, word) for name, word in zip(names, ("training", "held out")) if name in known]
        if apart:
            charts += [ChartSpec(f"{title}, {word}", ((name, ""),), 1.0, beyond) for name, word in called]
        elif called:
            charts.append(ChartSpec(title, tuple(called), 1.0, beyond))
    alike = len(units) == 1 and all(_in_proportion(run, f"speed/{units[0]}_per_second", MFU) for run in runs)
    for unit in units:
        title = f"{unit.capitalize()} per second{', which MFU is proportional to' if alike and MFU in known else ''}"
        charts.append(ChartSpec(title, ((f"speed/{unit}_per_second", ""),)))
    for title, name, scale, beyond in (
        ("MFU, %", MFU, 100.0, None),
        ("Gradient norm", "train/gradient_norm", 1.0, 20.0),
        ("Learning rate", "train/learning_rate", 1.0, None),
        ("Memory in use, GiB", MEMORY, 2.0**-30, None),
    ):
        if name in known and not (name == MFU and alike):
            charts.append(ChartSpec(title, ((name, ""),), scale, beyond))
    return charts


def _in_proportion(run: RunFiles, one: str, other: str) -> bool:
    """Return True if two curves are proportional, or one is missing."""
    a, b = run.curves.get(one), run.curves.get(other)
    if a is None or b is None:
        return True
    x, y = np.frombuffer(a.y, np.float64), np.frombuffer(b.y, np.float64)
    if len(x) != len(y) or not np.isfinite(x).all() or not (x > 0).all():
        return False
    ratio = y / x
    return bool(np.isfinite(ratio).all() and ratio.max() - ratio.min() <= 1e-3 * abs(ratio.max()))


def other_charts(runs: Sequence[RunFiles], drawn: Sequence[ChartSpec], max_charts: int = 24) -> list[ChartSpec]:
    """Return charts of all other curves with more than one value, each alone."""
    done = {name for chart in drawn for name, _ in chart.names}
    names = dict.fromkeys(name for run in runs for name, curve in run.curves.items() if len(curve.x) > 1)
    return [ChartSpec(name, ((name, ""),)) for name in names if name not in done][:max_charts]


def curve_picture(
    chart: ChartSpec, all_figures: Sequence[RunFigures], *, by_time: bool = False, points: int = MAX_TOTAL_POINTS
) -> Picture:
    """Draw one chart of one run or several, by step or by the time since each run began."""
    lines: list[Line] = []
    several = len(all_figures) > 1
    unit, divisor = "step", 1.0
    if by_time:
        longest = max_finite((_seconds(run) for run in all_figures), default=0.0)
        divisor, unit = next((size, name) for least, size, name in UNITS if longest >= least)
        unit = f"{unit} since the run began"
    for row, figures in enumerate(all_figures):
        for name, word in chart.names:
            curve = figures.run.curves.get(name)
            times = figures.run.times
            if curve is None or (by_time and times is None):
                # An empty line preserves the colors of the others.
                lines.append(Line(figures.run.name if several else word, (), ()))
                continue
            steps = np.frombuffer(curve.x, np.float64)
            x = times.at(steps) / divisor if by_time and times is not None else steps
            y = np.frombuffer(curve.y, np.float64) * chart.scale
            dashes = ("", "9 4", "2 4")[row // 8 % 3]
            lines.append(Line(figures.run.name if several else word or chart.title, x, y, dashes=dashes))
    marks = [] if several else _marks(all_figures[0], by_time, divisor)
    style = ChartStyle(
        logarithmic=_logarithmic(lines, chart.logarithmic_beyond),
        width=WIDTH,
        height=HEIGHT,
        titles_above=True,
        readable=True,
        max_points=max(points // max(len(lines), 1), 120),
    )
    picture = line_chart(lines, unit, style, marks=marks)
    return Picture(chart.title, picture.svg, title=chart.title)


def _seconds(figures: RunFigures) -> float | int:
    """Return the duration of a run's steps from first to last; 0 if unknown."""
    times = figures.run.times
    return float(times.seconds[-1]) if times is not None and len(times.seconds) else 0.0


def _logarithmic(lines: Sequence[Line], beyond: float | int | None) -> bool:
    if beyond is None:
        return False
    values = np.concatenate([np.asarray(line.y, np.float64) for line in lines])
    values = values[np.isfinite(values)]
    return len(values) > 0 and bool(values.min() > 0) and bool(values.max() / values.min() > beyond)


def _marks(figures: RunFigures, by_time: bool, divisor: float | int) -> list[Annotation]:
    annotations = []
    life = figures.run.life
    for n, mishap in enumerate(figures.mishaps, start=1):
        at = mishap.step
        if by_time:
            at = None if life is None else (mishap.at - life.sessions[0].began) / divisor
        if at is not None:
            annotations.append(Annotation(at, str(n), incident_label(n, mishap), incident_anchor(n)))
    return annotations


def incident_label(n: int, mishap: RunIncident) -> str:
    """Return the label of an incident's mark."""
    step = "" if mishap.step is None else f" at step {mishap.step:,}"
    return f"incident {n}{step}: {mishap.cause}"


def incident_anchor(n: int, row: int = 0) -> str:
    """Return the anchor of an incident's card on its page."""
    return f"incident-{row}-{n}"


def kind_color(kind: str) -> int:
    """Return the color of a kind of time."""
    return KINDS.get(kind, OTHER_COLOR)


def list_kinds(figures: RunFigures) -> list[str]:
    """Return the kinds of time that a run has spent, in the order of the bar."""
    life = figures.run.life
    if life is None:
        return []
    spent = [kind for kind, seconds in life.seconds.items() if seconds > 0]
    return sorted(spent, key=lambda kind: list(KINDS).index(kind) if kind in KINDS else len(KINDS))


def goodput_strip(figures: RunFigures, title: str, longest: float | int | None = None) -> Strip | None:
    """Draw the use of a run's time, without idle time; None without a ledger."""
    life = figures.run.life
    if life is None:
        return None
    kinds = [kind for kind in list_kinds(figures) if kind != IDLE]
    total_seconds = sum(life.seconds[kind] for kind in kinds)
    if total_seconds <= 0:
        return None
    parts = tuple(
        StripSegment(
            life.seconds[kind] / total_seconds,
            kind_color(kind),
            f"{kind}: {format_duration(life.seconds[kind])}, {format_percent(life.seconds[kind] / total_seconds)}",
        )
        for kind in kinds
    )
    length = min(total_seconds / longest, 1.0) if longest else 1.0
    return Strip(
        title, parts, f"goodput {format_percent(figures.goodput)} of {format_duration(total_seconds)}", length=length
    )


def timeline(figures: RunFigures, title: str, row: int = 0) -> Strip | None:
    """Draw a run's life from its beginning to its end, with its incidents; None without a ledger."""
    life = figures.run.life
    if life is None or not life.spans:
        return None
    first, last = life.spans[0][1], max_finite(until for _, _, until in life.spans)
    total_seconds = last - first
    if total_seconds <= 0:
        return None
    parts = tuple(
        StripSegment(
            (until - since) / total_seconds,
            kind_color(kind),
            f"{kind}: {format_duration(until - since)} from {format_time(since)}",
        )
        for kind, since, until in _merged(life.spans, total_seconds)
    )
    marks = tuple(
        Annotation(
            min(max((mishap.at - first) / total_seconds, 0.0), 1.0),
            str(n),
            incident_label(n, mishap),
            incident_anchor(n, row),
        )
        for n, mishap in enumerate(figures.mishaps, start=1)
    )
    divisor, unit = next((size, name) for least, size, name in UNITS if total_seconds >= least)
    scale = tuple((at * divisor / total_seconds, number(at)) for at in ticks(0, total_seconds / divisor, 6))
    return Strip(title, parts, f"{format_time(first)} to {format_time(last)}, in {unit}", marks, scale=scale)


MAX_SPANS = 400


def _merged(
    spans: Sequence[tuple[str, float | int, float | int]], total_seconds: float | int
) -> list[tuple[str, float | int, float | int]]:
    """Merge neighbors of one kind; if there are very many, each slice of time has the kind that fills most
    of it."""
    joined: list[tuple[str, float | int, float | int]] = []
    for kind, since, until in spans:
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1], until)
        elif until > since:
            joined.append((kind, since, until))
    if len(joined) <= MAX_SPANS:
        return joined
    first, slice_seconds = joined[0][1], total_seconds / MAX_SPANS
    filled: list[dict[str, float | int]] = [{} for _ in range(MAX_SPANS)]
    for kind, since, until in joined:
        n = int((since - first) / slice_seconds)
        while n < MAX_SPANS and first + n * slice_seconds < until:
            begin, end = first + n * slice_seconds, first + (n + 1) * slice_seconds
            filled[n][kind] = filled[n].get(kind, 0.0) + max(min(until, end) - max(since, begin), 0.0)
            n += 1
    sliced = [
        (max_finite(kinds, key=lambda kind: kinds[kind]), first + n * slice_seconds, first + (n + 1) * slice_seconds)
        for n, kinds in enumerate(filled)
        if kinds
    ]
    return _merged(sliced, total_seconds)
