"""Common parts of all drawings: the picture, its texts, colors, and round numbers along an axis."""

import math
from collections.abc import Sequence
from html import escape

COLORS = ("#0072b2", "#d55e00", "#009e73", "#b8549a", "#b58900", "#4a9fd8", "#7a6a58", "#5f5fd3")
"""Distinguishable with any of the common kinds of color blindness, on white; dark mode has lighter ones."""


def svg(height: float | int, parts: Sequence[str], width: float | int = 760, attributes: str = "") -> str:
    """Return a picture of these parts."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="system-ui, sans-serif" font-size="13" role="img"{attributes}>{"".join(parts)}</svg>'
    )


def text(
    x: float | int, y: float | int, words: str, *, anchor: str = "start", bold: bool = False, faint: bool = False
) -> str:
    """Return a text in a picture, in the color of the page's text."""
    weight = ' font-weight="600"' if bold else ""
    opacity = ' fill-opacity="0.65"' if faint else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor"{weight}{opacity}>{escape(words)}</text>'


def ticks(first: float | int, last: float | int, max_intervals: int = 10) -> list[float | int]:
    """Return round numbers from `first` to `last`, at most `max_intervals + 1` of them.

    >>> ticks(1, 8), ticks(0, 300), ticks(0.0, 1.0, 4)
    ([1, 2, 3, 4, 5, 6, 7, 8], [0, 50, 100, 150, 200, 250, 300], [0.0, 0.5, 1.0])
    """
    span = max(last - first, abs(first) * 1e-9, 1e-300)
    power = 10.0 ** (math.floor(math.log10(span / max_intervals)))
    step = next(size * power for size in (1, 2, 5, 10, 20) if span / (size * power) <= max_intervals * (1 + 1e-9))
    step = round(step) if step >= 1 else step
    return [n * step for n in range(math.ceil(first / step - 1e-9), math.floor(last / step + 1e-9) + 1)]


def logarithmic_ticks(low: float | int, high: float | int) -> list[float | int]:
    """Return powers of ten from `low` to `high`, thinned out if there are many, with steps of 2 and 5 between
    them if there are few.

    >>> logarithmic_ticks(0.5, 30.0), logarithmic_ticks(1e-3, 20.0)
    ([0.5, 1.0, 2.0, 5.0, 10.0, 20.0], [0.001, 0.01, 0.1, 1.0, 10.0])
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first > 3:
        every = -(-(last - first) // 6)
        powers = [10.0**power for power in range(first, last + 1, every)]
    else:
        powers = [size * 10.0**power for power in range(first, last + 1) for size in (1, 2, 5)]
    powers = [value for value in powers if low * 0.999 <= value <= high * 1.001]
    return powers if len(powers) > 1 else list(ticks(low, high, 4))


def number(value: float | int) -> str:
    """Format a number in few characters.

    >>> [number(value) for value in (0, 0.00025, 0.000141, 0.5, 12, 3456.7, 12000, 2.5e6, 3e12, 1e-7)]
    ['0', '0.00025', '1.41e-4', '0.5', '12', '3,457', '12k', '2.5M', '3T', '1e-7']
    """
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4 or (size < 1e-2 and len(f"{size:.4g}") > 7):
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    for divisor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= max(divisor, 1e4):
            return f"{value / divisor:.4g}{letter}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"
