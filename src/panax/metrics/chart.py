"""A chart of lines as SVG, for a notebook, a file or a page. Text takes the colour of the page."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 14, 252
"""What is left free beside the lines, in pixels; `BOTTOM` is where the x axis lies."""

COLOURS = ("#2f5fc4", "#e4572e", "#3aa17e", "#b23a8a", "#c99a1a", "#5b8def", "#0b6e4f", "#777777")
MOST_MARKED = 40
"""A line of more points has no circles on them."""


class Line(NamedTuple):
    """One line of a chart.

    Attributes:
        x: Where its points are; as many as of `y`. Points that are not finite are left out.
        colour: Empty takes the next one.
        dashes: As SVG's `stroke-dasharray`; empty for none.
        marked: Whether few points have circles.
    """

    title: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = ""
    dashes: str = ""
    marked: bool = True


class Chart:
    """A picture as SVG; a notebook shows it.

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
        """Write it to a file."""
        Path(path).write_text(self.svg, encoding="utf-8")


def line_chart(lines: Sequence[Line], x_label: str, *, logarithmic: bool = False) -> Chart:
    """Lines with their titles beside them.

    Args:
        logarithmic: Of the y axis; values that are not above 0 are left out.
    """

    kept = [[(float(x), float(y)) for x, y in zip(line.x, line.y)] for line in lines]
    kept = [
        [(x, y) for x, y in found if math.isfinite(x) and math.isfinite(y) and (y > 0 or not logarithmic)]
        for found in kept
    ]
    points = [point for found in kept for point in found]
    if not points:
        return Chart(svg(40, [text(LEFT, 20, "nothing to draw", faint=True)]))
    change = math.log10 if logarithmic else float
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    low, high = change(min(y for _, y in points)), change(max(y for _, y in points))
    margin = (high - low) * 0.08 or max(abs(high) * 0.01, 1e-3)
    low, high, right = low - margin, high + margin, WIDTH - RIGHT

    def place(x: float | int, y: float | int) -> tuple[float, float]:
        along = (x - first) / (last - first) if last > first else 0.0
        return LEFT + (right - LEFT) * along, BOTTOM - (BOTTOM - TOP) * (change(y) - low) / (high - low)

    parts = []
    for n in range(5):
        level, height = low + (high - low) * n / 4, BOTTOM - (BOTTOM - TOP) * n / 4
        parts.append(f'<path d="M{LEFT} {height:.1f}H{right}" stroke="currentColor" stroke-opacity="0.12"/>')
        label = f"{10**level:.0e}" if logarithmic else f"{level:.4g}"
        parts.append(text(LEFT - 8, height + 4, label, anchor="end", faint=True))
    for x in _ticks(first, last):
        parts.append(text(place(x, points[0][1])[0], BOTTOM + 18, f"{x:g}", anchor="middle", faint=True))
    parts.append(text((LEFT + right) / 2, HEIGHT - 8, x_label, anchor="middle", faint=True))
    for row, (line, found) in enumerate(zip(lines, kept)):
        colour = line.colour or COLOURS[row % len(COLOURS)]
        dash = f' stroke-dasharray="{line.dashes}"' if line.dashes else ""
        drawn = [place(x, y) for x, y in found]
        if drawn:
            path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in drawn)
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if line.marked and len(drawn) <= MOST_MARKED:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in drawn]
        parts.append(f'<path d="M{right + 14} {TOP + 8 + row * 20}h22" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(text(right + 42, TOP + 12 + row * 20, line.title))
    return Chart(svg(max(HEIGHT, TOP + 20 * len(lines) + 12), parts))


def _ticks(first: float | int, last: float | int) -> list[float | int]:
    """At most 11 round numbers from `first` to `last`.

    >>> _ticks(1, 8), _ticks(0, 300)
    ([1, 2, 3, 4, 5, 6, 7, 8], [0, 50, 100, 150, 200, 250, 300])
    """
    span = max(last - first, 1e-9)
    step = next(size * 10**power for power in range(-9, 16) for size in (1, 2, 5) if span / (size * 10**power) <= 10)
    step = int(step) if step >= 1 else step
    return [n * step for n in range(math.ceil(first / step), math.floor(last / step) + 1)]


def svg(height: float | int, parts: Sequence[str]) -> str:
    """A picture of these parts."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img">{"".join(parts)}</svg>'
    )


def text(
    x: float | int, y: float | int, words: str, *, anchor: str = "start", bold: bool = False, faint: bool = False
) -> str:
    """Words in a picture."""
    weight = ' font-weight="600"' if bold else ""
    opacity = ' fill-opacity="0.65"' if faint else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor"{weight}{opacity}>{escape(words)}</text>'
