"""Plots as SVG: bars with their spread, and lines. Text takes the colour of the page."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from panax.metrics.chart import WIDTH, Line, line_chart, svg, text

COLOURS = {
    "torch_eager": "#e4572e",
    "torch_compile": "#b23a1a",
    "torch_xla": "#f2a48a",
    "plain_jax": "#5b8def",
    "flax": "#2f5fc4",
    "adapted": "#3aa17e",
    "panax": "#0b6e4f",
}
"""PyTorch's columns in reds, JAX's in blues, Panax's in greens."""

OTHER = "#777777"
LEFT, RIGHT, ROW = 150, 96, 34


class Bar(NamedTuple):
    """A value with its spread.

    Attributes:
        text: What stands behind it.
        faint: It can't be compared with the others.
    """

    name: str
    title: str
    value: float
    low: float
    high: float
    text: str
    faint: bool = False


def bars(found: Sequence[Bar], axis: str) -> str:
    """Horizontal bars from zero, with a line from the least to the most."""
    height = ROW * len(found) + 40
    most = max((bar.high for bar in found), default=1.0) or 1.0
    top = _round_up(most)
    scale = (WIDTH - LEFT - RIGHT) / top
    parts = [_ticks(top, scale, height - 28)]
    for row, bar in enumerate(found):
        y = row * ROW + 6
        colour = COLOURS.get(bar.name, OTHER)
        opacity = 0.35 if bar.faint else 1
        parts.append(text(LEFT - 10, y + 15, bar.title, anchor="end"))
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{max(bar.value * scale, 1):.1f}" height="{ROW - 12}" rx="3" fill="{colour}" '
            f'fill-opacity="{opacity}"><title>{escape(bar.title)}: {escape(bar.text)}</title></rect>'
        )
        middle = y + (ROW - 12) / 2
        if bar.high > bar.low:
            x1, x2 = LEFT + bar.low * scale, LEFT + bar.high * scale
            parts.append(
                f'<path d="M{x1:.1f} {middle - 5}v10M{x1:.1f} {middle}H{x2:.1f}M{x2:.1f} {middle - 5}v10" stroke="currentColor" '
                'stroke-width="1.5" fill="none"/>'
            )
        parts.append(text(LEFT + max(bar.high, bar.value) * scale + 8, y + 15, bar.text, bold=True))
    parts.append(text(LEFT + (WIDTH - LEFT - RIGHT) / 2, height - 2, axis, anchor="middle", faint=True))
    return svg(height, parts)


def lines(series: Mapping[str, tuple[str, Sequence[float]]], axis: str, *, logarithmic: bool = False) -> str:
    """A line for each name, over steps; names ending in `limit` are dashed.

    Args:
        series: Name to its title and its values.
    """
    drawn = []
    for row, (name, (title, found)) in enumerate(series.items()):
        limit = name.endswith("limit")
        colour = "currentColor" if limit else COLOURS.get(name, OTHER)
        dashes = "2 5" if limit else "9 4" if row % 2 else ""
        drawn.append(Line(title, range(1, len(found) + 1), found, colour, dashes, marked=not limit))
    return line_chart(drawn, axis, logarithmic=logarithmic).svg


def _ticks(top: float, scale: float, bottom: int) -> str:
    parts = []
    for n in range(5):
        value = top * n / 4
        x = LEFT + value * scale
        parts.append(f'<path d="M{x:.1f} 0V{bottom:.0f}" stroke="currentColor" stroke-opacity="0.12"/>')
        parts.append(text(x, bottom + 12, f"{value:.3g}", anchor="middle", faint=True))
    return "".join(parts)


def _round_up(value: float) -> float:
    """The next of 1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8 times a power of ten."""
    power = 10 ** math.floor(math.log10(value))
    return next(
        (n * power for n in (1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 6.0, 8.0, 10.0) if n * power >= value * 0.999), value
    )
