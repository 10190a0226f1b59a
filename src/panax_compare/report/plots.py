"""The comparison's plots: each column has the same color in all of them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from panax.metrics.page import bars as page_bars
from panax.metrics.page.lines import ChartStyle, Line, line_chart

WIDTH = 560
"""Of a chart in pixels: a phone shows it at two thirds of its size."""

COLORS = {
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


class ColumnBar(NamedTuple):
    """A column's value with its spread; attributes as in `panax.metrics.page.bars.Bar`."""

    name: str
    title: str
    value: float
    low: float
    high: float
    text: str
    faint: bool = False


def bars(columns: Sequence[ColumnBar], axis: str) -> str:
    """Draw horizontal bars from zero, with a line from the minimum to the maximum."""
    colored = [
        page_bars.Bar(bar.title, bar.value, bar.low, bar.high, bar.text, COLORS.get(bar.name, OTHER), bar.faint)
        for bar in columns
    ]
    return page_bars.bar_chart(colored, axis)


def lines(series: Mapping[str, tuple[str, Sequence[float]]], axis: str, *, logarithmic: bool = False) -> str:
    """Draw a line for each name, over steps; names ending in `limit` are dashed.

    Args:
        series: Maps a name to its title and its values.
    """
    drawn = []
    for row, (name, (title, values)) in enumerate(series.items()):
        limit = name.endswith("limit")
        color = "currentColor" if limit else COLORS.get(name, OTHER)
        dashes = "2 5" if limit else "9 4" if row % 2 else ""
        drawn.append(Line(title, range(1, len(values) + 1), values, color, dashes, marked=not limit))
    return line_chart(drawn, axis, ChartStyle(logarithmic=logarithmic, width=WIDTH, titles_above=True)).svg
