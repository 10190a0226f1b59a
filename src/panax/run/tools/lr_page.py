"""Result of a range test as lines for a terminal, and as a page."""

import math
from collections.abc import Sequence
from pathlib import Path

from ...core.finite_stats import max_finite, min_finite
from ...metrics.page import html
from ...metrics.page.blocks import Annotation, FigureTiles, Paragraph, Picture, Section, Tile
from ...metrics.page.lines import ChartStyle, Line, line_chart
from .lr_curve import RATE_DIVISOR, RateSearch

ROWS, COLUMNS = 14, 66


def format_rate_curve(search: RateSearch) -> list[str]:
    """Format the curve, followed by the answer."""
    return [*plot_losses(search.rates, search.smoothed), "", *format_recommendation(search)]


def format_recommendation(search: RateSearch) -> list[str]:
    """Format the recommended rate and its reasons; or the reason why there is none."""
    if search.recommended is None or search.steepest is None or search.peak is None:
        return ["no rate can be recommended: " + search.why]
    lowest = search.recommended * RATE_DIVISOR
    rows = [
        ("lowest loss", f"at a rate of {lowest:.2g}"),
        ("steepest fall", f"at a rate of {search.steepest:.2g}"),
        ("recommended", f"{search.recommended:.2g}: a tenth of the rate of the lowest smoothed loss"),
        ("set", f"--optimizer.schedule.peak {search.peak:.2g}"),
    ]
    return [f"{name:<15}{value}" for name, value in rows]


def plot_losses(rates: Sequence[float], losses: Sequence[float]) -> list[str]:
    """Plot losses over the logarithm of the rate, in characters: at most 80 columns."""
    points = [(math.log10(rate), loss) for rate, loss in zip(rates, losses) if math.isfinite(loss)]
    if len(points) < 2:
        return []
    first, last = points[0][0], points[-1][0]
    # A loss that has diverged would leave no room for the rest.
    highest = min(max_finite(loss for _, loss in points), points[0][1] + abs(points[0][1]) / 4)
    lowest = min_finite(loss for _, loss in points)
    high = max(highest, lowest + 1e-9)
    cells = [[" "] * COLUMNS for _ in range(ROWS)]
    for x, loss in points:
        row = round((high - min(loss, high)) / (high - lowest) * (ROWS - 1))
        cells[row][round((x - first) / (last - first) * (COLUMNS - 1))] = "*"
    labels = {0: f"{high:.3g}", ROWS - 1: f"{lowest:.3g}"}
    drawn = [f"{labels.get(n, ''):>8} |{''.join(row).rstrip()}" for n, row in enumerate(cells)]
    left, right = f"{rates[0]:.1e}", f"{rates[len(points) - 1]:.1e}"
    return [*drawn, f"{'':>8} +{'-' * COLUMNS}", f"{'':>10}{left}{'rate':^{COLUMNS - len(left) - len(right)}}{right}"]


def write_page(search: RateSearch, name: str, output: str | Path) -> Path:
    """Write the page to `output`.

    Raises:
        DataError: The page can't be written.
    """
    return html.write_page(output, f"Learning rate of {name}", _sections(search), parents=True)


def _sections(search: RateSearch) -> list[Section]:
    lines = [
        Line("smoothed", search.rates, search.smoothed, marked=False),
        Line("each step", search.rates, search.losses, marked=False),
    ]
    marks = (
        []
        if search.recommended is None
        else [Annotation(search.recommended, "recommended", f"recommended: {search.recommended:.2g}")]
    )
    drawn = line_chart(
        lines, "learning rate", ChartStyle(logarithmic_x=True, titles_above=True, readable=True), marks=marks
    )
    tiles = FigureTiles(
        (
            Tile("Recommended", _short(search.recommended), "a tenth of the rate of the lowest smoothed loss"),
            Tile("Steepest fall", _short(search.steepest), "by the logarithm of the rate"),
            Tile(
                "Steps", f"{len(search.rates)}", "the loss ended them" if search.diverged else "up to the highest rate"
            ),
        )
    )
    blocks = (Paragraph(" ".join(format_recommendation(search)[-1:]), lead=True), tiles)
    return [Section("", blocks), Section("Loss by rate", (Picture("loss", drawn.svg, title="Loss by rate"),))]


def _short(rate: float | None) -> str:
    return "—" if rate is None else f"{rate:.2g}"
