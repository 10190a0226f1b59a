"""Line charts as SVG, for a notebook, a file or a page. Text has the color of the page."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from .blocks import Annotation
from .svg import COLORS, logarithmic_ticks, number, svg, text, ticks

WIDTH, HEIGHT = 760, 300
MARK_PIXELS = 19
"""Width in pixels per point from which a line has circles on its points."""

MAX_POINTS = 800
"""Number of points from which a line is thinned out: of each stretch its minimum and its maximum are
drawn."""

MIN_SPAN = 0.04
"""Minimum span of the y axis, relative to a curve's maximum."""

MAX_VALUE = 1e300
"""Limit beyond which even the difference of two values overflows."""

Points = Float64[np.ndarray, "point 2"]
Values = Sequence[float | int] | Float64[np.ndarray, " point"]


class Line(NamedTuple):
    """One line of a chart.

    Attributes:
        x: Positions of the points, ascending; as many as in `y`. A point that is not finite leaves a gap.
        color: Empty for the page's next color; only those change in dark mode.
        dashes: SVG's `stroke-dasharray`; empty for none.
        marked: True if a line with few points has circles.
    """

    title: str
    x: Values
    y: Values
    color: str = ""
    dashes: str = ""
    marked: bool = True


class Chart:
    """A picture as SVG, displayed by notebooks.

    Attributes:
        svg: Its source.
    """

    def __init__(self, svg: str):
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return "Chart: a notebook shows it; chart.save('loss.svg') writes it"

    def save(self, path: str | Path) -> None:
        """Write the chart to a file."""
        Path(path).write_text(self.svg, encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class _Plane:
    """Mapping of values to positions in the picture."""

    x: tuple[float | int, float | int]
    y: tuple[float | int, float | int]
    left: float | int
    right: float | int
    top: float | int
    bottom: float | int
    logarithmic: bool
    logarithmic_x: bool = False

    def across(self, x: float | int) -> float | int:
        first, last = self.x
        x = math.log10(x) if self.logarithmic_x else x
        return self.left + (self.right - self.left) * ((x - first) / (last - first) if last > first else 0.0)

    def up(self, y: float | int) -> float | int:
        low, high = self.y
        value = math.log10(y) if self.logarithmic else y
        return self.bottom - (self.bottom - self.top) * (value - low) / (high - low)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChartStyle:
    """How a line chart is drawn.

    Attributes:
        logarithmic: Logarithmic y axis; values not above 0 leave a gap.
        logarithmic_x: Logarithmic x axis; all of its values must be above 0.
        titles_above: Put the titles above the lines, and omit a single one. Titles for which half the width is not
            enough are above in any case.
        readable: Include the values, which a page shows at the pointer.
        max_points: Maximum number of points of a line; a longer one is thinned out.
    """

    logarithmic: bool = False
    logarithmic_x: bool = False
    width: int = WIDTH
    height: int = HEIGHT
    titles_above: bool = False
    readable: bool = False
    max_points: int = MAX_POINTS


def line_chart(
    lines: Sequence[Line], x_label: str, style: ChartStyle = ChartStyle(), *, marks: Sequence[Annotation] = ()
) -> Chart:
    """Draw lines with their titles next to them.

    Args:
        marks: Positions on the x axis, drawn as vertical lines.
    """
    width, height, logarithmic = style.width, style.height, style.logarithmic
    thinned = [thin_points(_points(line, logarithmic), style.max_points) for line in lines]
    finite = [points[np.isfinite(points[:, 1])] for points in thinned]
    together = np.concatenate(finite) if finite else np.zeros((0, 2))
    if not len(together):
        return Chart(svg(40, [text(16, 24, "nothing to draw", faint=True)], width))
    beside = max(170, 48 + CHARACTER_WIDTH * max(len(line.title) for line in lines))
    titles_above = style.titles_above or beside > width / 2
    head = _titles_above(lines, width) if titles_above else []
    left, right = (52, width - 26) if titles_above else (70, width - beside)
    plane = _plane(together, logarithmic, style.logarithmic_x, left, right, 14 + 20 * len(head), height - 48)
    labels = max((len(number(value)) for value in _levels(plane)), default=0)
    plane = dataclasses.replace(plane, left=max(left, 12 + CHARACTER_WIDTH * labels))
    parts = [*_grid(plane, x_label, height)]
    for row, titles in enumerate(head):
        parts += [_title(x, 14 + 20 * row, lines[n], n, len(finite[n])) for n, x in titles]
    for mark in marks:
        parts.append(_mark(plane, mark))
    for row, (line, points) in enumerate(zip(lines, thinned)):
        parts.append(_line(plane, line, points, row, style.readable))
        if not titles_above:
            parts.append(_title(right + 14, plane.top + 8 + row * 20, line, row, len(finite[row])))
    total_height = height if titles_above else max(height, int(plane.top) + 20 * len(lines) + 12)
    return Chart(svg(total_height, parts, width, _scale(plane) if style.readable else ""))


def thin_points(points: Points, max_points: int) -> Float64[np.ndarray, "kept 2"]:
    """Thin a line out to about `max_points` points: of each stretch the minimum and the maximum, and a gap if it
    has one."""
    if len(points) <= max_points:
        return points
    keep = {0, len(points) - 1}
    for stretch in np.array_split(np.arange(len(points)), max(max_points // 2, 1)):
        values = points[stretch, 1]
        finite = np.isfinite(values)
        if finite.any():
            keep.add(int(stretch[np.argmin(np.where(finite, values, np.inf))]))
            keep.add(int(stretch[np.argmax(np.where(finite, values, -np.inf))]))
        if not finite.all():
            keep.add(int(stretch[np.argmin(finite)]))
    return points[sorted(keep)]


def _points(line: Line, logarithmic: bool) -> Points:
    x, y = np.asarray(line.x, np.float64), np.asarray(line.y, np.float64)
    count = min(len(x), len(y))
    points = np.stack([x[:count], y[:count]], axis=1)
    points = points[np.isfinite(points[:, 0])]
    lacking = ~(np.abs(points[:, 1]) < MAX_VALUE) | ((points[:, 1] <= 0) if logarithmic else False)
    return np.where(np.stack([np.zeros_like(lacking), lacking], axis=1), np.nan, points)


def _plane(
    points: Points,
    logarithmic: bool,
    logarithmic_x: bool,
    left: float | int,
    right: float | int,
    top: float | int,
    bottom: float | int,
) -> _Plane:
    values = np.log10(points[:, 1]) if logarithmic else points[:, 1]
    x = np.log10(points[:, 0]) if logarithmic_x else points[:, 0]
    low, high = float(values.min()), float(values.max())
    margin = (high - low) * 0.08
    if not logarithmic:
        # A curve that hardly changes is drawn flat.
        margin = max(margin, (MIN_SPAN * max(abs(low), abs(high)) - (high - low)) / 2)
    margin = margin or 1e-3
    low, high = (0.0 if 0 <= low < margin * 2 and not logarithmic else low - margin), high + margin
    return _Plane((float(x.min()), float(x.max())), (low, high), left, right, top, bottom, logarithmic, logarithmic_x)


def _levels(plane: _Plane) -> list[float]:
    """Return the values of the y axis that have a line and a label."""
    low, high = plane.y
    return list(logarithmic_ticks(10**low, 10**high) if plane.logarithmic else ticks(low, high, 6))


def _grid(plane: _Plane, x_label: str, height: int) -> Iterator[str]:
    for value in _levels(plane):
        y = plane.up(value)
        yield f'<path d="M{plane.left} {y:.1f}H{plane.right}" stroke="currentColor" stroke-opacity="0.12"/>'
        yield text(plane.left - 8, y + 4, number(value), anchor="end", faint=True)
    first, last = plane.x
    max_ticks = max(2, int((plane.right - plane.left) / 70))
    for x in logarithmic_ticks(10**first, 10**last) if plane.logarithmic_x else ticks(first, last, max_ticks):
        yield text(plane.across(x), plane.bottom + 18, number(x), anchor="middle", faint=True)
    yield text((plane.left + plane.right) / 2, height - 8, x_label, anchor="middle", faint=True)


def _color(line: Line, row: int) -> str:
    return (
        f'stroke="{line.color}"' if line.color else f'class="s{row % len(COLORS)}" stroke="{COLORS[row % len(COLORS)]}"'
    )


def _line(plane: _Plane, line: Line, points: Points, row: int, readable: bool) -> str:
    """Draw a path with its gaps; isolated points, and those of a short line, are circles."""
    color = _color(line, row)
    path, circles, run = [], [], []
    alone_too = line.marked and np.isfinite(points[:, 1]).sum() * MARK_PIXELS <= plane.right - plane.left
    for x, y in [*points.tolist(), (0.0, math.nan)]:
        if math.isfinite(y):
            run.append(f"{plane.across(x):.1f} {plane.up(y):.1f}")
            continue
        if len(run) > 1:
            path.append("M" + "L".join(run))
        if len(run) == 1 or alone_too:
            circles += run
        run = []
    data = ""
    if readable:
        coordinates = " ".join(f"{x:.7g},{y:.5g}" for x, y in points.tolist() if math.isfinite(y))
        data = f' data-title="{escape(line.title)}" data-points="{coordinates}"'
    dash = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
    dots = "".join(f'<circle cx="{a}" cy="{b}" r="2.6"/>' for a, b in (point.split() for point in circles))
    return (
        f'<g {color} stroke-width="2" fill="none"{data}><path d="{"".join(path)}" stroke-linejoin="round"{dash}/>{dots}</g>'
        if path
        else f'<g {color} stroke-width="2" fill="none"{data}>{dots}</g>'
    )


def _title(x: float | int, y: float | int, line: Line, row: int, points: int) -> str:
    dash = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
    drawn = f'<path d="M{x:.1f} {y:.1f}h22" {_color(line, row)} stroke-width="2"{dash}/>'
    if points == 1:
        drawn = (
            f'<g {_color(line, row)} stroke-width="2" fill="none"><circle cx="{x + 11:.1f}" cy="{y:.1f}" r="2.6"/></g>'
        )
    return drawn + text(x + 28, y + 4, line.title)


CHARACTER_WIDTH = 6.9
"""Average width of a letter in pixels."""


def _titles_above(lines: Sequence[Line], width: int) -> list[list[tuple[int, float | int]]]:
    """Return rows of (index of a line, beginning of its title); none if there is only one line."""
    if len(lines) < 2:
        return []
    rows: list[list[tuple[int, float | int]]] = [[]]
    x = 10.0
    for n, line in enumerate(lines):
        wide = 44 + CHARACTER_WIDTH * len(line.title)
        if rows[-1] and x + wide > width:
            rows.append([])
            x = 10.0
        rows[-1].append((n, x))
        x += wide
    return rows


def _mark(plane: _Plane, mark: Annotation) -> str:
    at = math.log10(mark.at) if plane.logarithmic_x and mark.at > 0 else mark.at
    if not plane.x[0] <= at <= plane.x[1]:
        return ""
    x = plane.across(mark.at)
    drawn = (
        f'<g class="mark" stroke="#c0392b"><title>{escape(mark.text)}</title>'
        f'<path d="M{x:.1f} {plane.top - 4:.1f}V{plane.bottom:.1f}" stroke-width="1.2" stroke-dasharray="3 3"/>'
        f'<circle cx="{x:.1f}" cy="{plane.top - 4:.1f}" r="4" fill="#c0392b"/></g>'
    )
    return f'<a href="#{escape(mark.anchor)}">{drawn}</a>' if mark.anchor else drawn


def _scale(plane: _Plane) -> str:
    """Return the attributes that a page needs to find the values below a pointer."""
    of_x = f"{plane.x[0]:.9g},{plane.x[1]:.9g},{plane.left:.1f},{plane.right:.1f}"
    of_y = f"{plane.y[0]:.9g},{plane.y[1]:.9g},{plane.bottom:.1f},{plane.top:.1f}"
    ways = (" data-logarithmic=1" if plane.logarithmic else "") + (
        " data-logarithmic-x=1" if plane.logarithmic_x else ""
    )
    return f' class="curve" data-x="{of_x}" data-y="{of_y}"{ways}'
