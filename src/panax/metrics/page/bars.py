"""Bars with their spread as SVG."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from .svg import svg, text

WIDTH, LEFT, RIGHT, ROW = 760, 150, 96, 34


class Bar(NamedTuple):
    """A value with its spread.

    Attributes:
        text: What stands behind it.
        faint: It can't be compared with the others.
    """

    title: str
    value: float | int
    low: float | int
    high: float | int
    text: str
    colour: str
    faint: bool = False


def bar_chart(bars: Sequence[Bar], axis: str) -> str:
    """Horizontal bars from zero, with a line from the least to the most."""
    height = ROW * len(bars) + 40
    most = max((bar.high for bar in bars), default=1.0) or 1.0
    top = _round_up(most)
    scale = (WIDTH - LEFT - RIGHT) / top
    parts = [_ticks(top, scale, height - 28)]
    for row, bar in enumerate(bars):
        y = row * ROW + 6
        opacity = 0.35 if bar.faint else 1
        parts.append(text(LEFT - 10, y + 15, bar.title, anchor="end"))
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{max(bar.value * scale, 1):.1f}" height="{ROW - 12}" rx="3" fill="{bar.colour}" '
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


def _ticks(top: float | int, scale: float | int, bottom: int) -> str:
    parts = []
    for n in range(5):
        value = top * n / 4
        x = LEFT + value * scale
        parts.append(f'<path d="M{x:.1f} 0V{bottom:.0f}" stroke="currentColor" stroke-opacity="0.12"/>')
        parts.append(text(x, bottom + 12, f"{value:.3g}", anchor="middle", faint=True))
    return "".join(parts)


def _round_up(value: float | int) -> float | int:
    """The next of 1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8 times a power of ten."""
    power = 10 ** math.floor(math.log10(value))
    return next(
        (n * power for n in (1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 6.0, 8.0, 10.0) if n * power >= value * 0.999), value
    )
