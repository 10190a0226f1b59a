"""Plots as SVG: bars with their spread, and lines. Text takes the colour of the page."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

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
WIDTH, LEFT, RIGHT, ROW = 760, 150, 96, 34


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
        parts.append(_text(LEFT - 10, y + 15, bar.title, anchor="end"))
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
        parts.append(_text(LEFT + max(bar.high, bar.value) * scale + 8, y + 15, bar.text, bold=True))
    parts.append(_text(LEFT + (WIDTH - LEFT - RIGHT) / 2, height - 2, axis, anchor="middle", faint=True))
    return _svg(height, parts)


def lines(series: Mapping[str, tuple[str, Sequence[float]]], axis: str, *, logarithmic: bool = False) -> str:
    """A line for each name, over steps; names ending in `limit` are dashed.

    Args:
        series: Name to its title and its values.
    """
    height, bottom, top = 300, 252, 14
    values = [v for _, found in series.values() for v in found if math.isfinite(v) and (v > 0 or not logarithmic)]
    if not values:
        return _svg(40, [_text(LEFT, 20, "nothing to draw", faint=True)])
    change = math.log10 if logarithmic else float
    low, high = change(min(values)), change(max(values))
    margin = (high - low) * 0.08 or max(abs(high) * 0.01, 1e-3)
    low, high = low - margin, high + margin
    steps = max(len(found) for _, found in series.values())
    right = WIDTH - 170

    def x(step: int) -> float:
        return 70 + (right - 70) * (step / max(steps - 1, 1))

    def y(value: float) -> float:
        return bottom - (bottom - top) * (change(value) - low) / (high - low)

    parts = []
    for n in range(5):
        level = low + (high - low) * n / 4
        label = f"{10**level:.0e}" if logarithmic else f"{level:.4g}"
        place = bottom - (bottom - top) * n / 4
        parts.append(f'<path d="M70 {place:.1f}H{right}" stroke="currentColor" stroke-opacity="0.12"/>')
        parts.append(_text(62, place + 4, label, anchor="end", faint=True))
    for step in range(steps):
        parts.append(_text(x(step), bottom + 18, str(step + 1), anchor="middle", faint=True))
    parts.append(_text((70 + right) / 2, height - 8, axis, anchor="middle", faint=True))
    for row, (name, (title, found)) in enumerate(series.items()):
        drawn = [(x(n), y(v)) for n, v in enumerate(found) if math.isfinite(v) and (v > 0 or not logarithmic)]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in drawn)
        limit = name.endswith("limit")
        colour = "currentColor" if limit else COLOURS.get(name, OTHER)
        dash = ' stroke-dasharray="2 5"' if limit else ' stroke-dasharray="9 4"' if row % 2 else ""
        if drawn:
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in drawn if not limit]
        parts.append(f'<path d="M{right + 14} {top + 8 + row * 20}h22" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(_text(right + 42, top + 12 + row * 20, title))
    return _svg(height, parts)


def _svg(height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img">{"".join(parts)}</svg>'
    )


def _text(
    x: float | int, y: float | int, words: str, *, anchor: str = "start", bold: bool = False, faint: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    opacity = ' fill-opacity="0.65"' if faint else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor"{weight}{opacity}>{escape(words)}</text>'


def _ticks(top: float, scale: float, bottom: int) -> str:
    parts = []
    for n in range(5):
        value = top * n / 4
        x = LEFT + value * scale
        parts.append(f'<path d="M{x:.1f} 0V{bottom:.0f}" stroke="currentColor" stroke-opacity="0.12"/>')
        parts.append(_text(x, bottom + 12, f"{value:.3g}", anchor="middle", faint=True))
    return "".join(parts)


def _round_up(value: float) -> float:
    """The next of 1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8 times a power of ten."""
    power = 10 ** math.floor(math.log10(value))
    return next(
        (n * power for n in (1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 6.0, 8.0, 10.0) if n * power >= value * 0.999), value
    )
