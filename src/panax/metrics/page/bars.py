"""Bar charts with the spread of values, as SVG."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from .svg import svg, text

WIDTH, LEFT, RIGHT, ROW = 760, 150, 96, 34


class Bar(NamedTuple):
    """One value with its spread.

    Attributes:
        text: Text after the bar.
        faint: True if it can't be compared with the others.
    """

    title: str
    value: float | int
    low: float | int
    high: float | int
    text: str
    color: str
    faint: bool = False


WIDE = 30
"""Ratio of the longest to the shortest bar from which the axis is logarithmic, starting at the power of ten
below the shortest."""


def bar_chart(bars: Sequence[Bar], axis: str) -> str:
    """Draw horizontal bars from zero, or on a logarithmic axis if they differ widely, with a line from the
    minimum to the maximum."""
    height = ROW * len(bars) + 44
    longest = max((bar.high for bar in bars), default=1.0) or 1.0
    shortest = min((bar.low for bar in bars), default=0.0)
    parts: list[str] = []
    if shortest > 0 and longest > WIDE * shortest:
        first, last = math.floor(math.log10(shortest)), math.log10(longest)
        pixels = (WIDTH - LEFT - RIGHT) / (last - first)
        axis = f"{axis}, by powers of ten"

        def across(value: float | int) -> float:
            return max(math.log10(value) - first, 0.0) * pixels if value > 0 else 0.0

        marks = [10.0**power for power in range(first, math.floor(last) + 1)]
    else:
        top = _round_up(longest)

        def across(value: float | int) -> float:
            return value * (WIDTH - LEFT - RIGHT) / top

        marks = [top * n / 4 for n in range(5)]
    parts.append(_ticks([(LEFT + across(value), value) for value in marks], height - 32))
    for row, bar in enumerate(bars):
        y = row * ROW + 6
        opacity = 0.35 if bar.faint else 1
        parts.append(text(LEFT - 10, y + 15, bar.title, anchor="end"))
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{max(across(bar.value), 1):.1f}" height="{ROW - 12}" rx="3" fill="{bar.color}" '
            f'fill-opacity="{opacity}"><title>{escape(bar.title)}: {escape(bar.text)}</title></rect>'
        )
        middle = y + (ROW - 12) / 2
        if bar.high > bar.low:
            x1, x2 = LEFT + across(bar.low), LEFT + across(bar.high)
            parts.append(
                f'<path d="M{x1:.1f} {middle - 5}v10M{x1:.1f} {middle}H{x2:.1f}M{x2:.1f} {middle - 5}v10" stroke="currentColor" '
                'stroke-width="1.5" fill="none"/>'
            )
        parts.append(text(LEFT + across(max(bar.high, bar.value)) + 8, y + 15, bar.text, bold=True))
    parts.append(text(LEFT + (WIDTH - LEFT - RIGHT) / 2, height - 6, axis, anchor="middle", faint=True))
    return svg(height, parts)


def _ticks(marks: Sequence[tuple[float, float]], bottom: int) -> str:
    parts = []
    for x, value in marks:
        parts.append(f'<path d="M{x:.1f} 0V{bottom:.0f}" stroke="currentColor" stroke-opacity="0.12"/>')
        parts.append(text(x, bottom + 12, f"{value:.3g}", anchor="middle", faint=True))
    return "".join(parts)


def _round_up(value: float | int) -> float | int:
    """Return the next of 1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8 times a power of ten."""
    power = 10 ** math.floor(math.log10(value))
    return next(
        (n * power for n in (1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 6.0, 8.0, 10.0) if n * power >= value * 0.999), value
    )
