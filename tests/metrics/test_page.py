"""The page builder: whole, self-contained, escaped, and curves that keep what they thin out."""

import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from panax.metrics.page.blocks import (
    Annotation,
    Card,
    Code,
    FigureTiles,
    Fold,
    Grid,
    Paragraph,
    Picture,
    Points,
    Section,
    Strip,
    Strips,
    StripSegment,
    Tabs,
    TextTable,
    Tile,
)
from panax.metrics.page.html import page
from panax.metrics.page.lines import CHARACTER_WIDTH, ChartStyle, Line, line_chart, thin_points
from panax.metrics.page.markdown import markdown
from panax.metrics.page.svg import logarithmic_ticks, number, ticks

VOID = {"meta", "path", "circle", "line", "input"}
BAD = "<script>alert('x')</script>\"&"


class Balanced(HTMLParser):
    """Collects what the page would fetch, its anchors and ids; fails on tags that don't close each other."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attribute = dict(attributes)
        self.tags.append(tag)
        self.ids += [attribute["id"]] if "id" in attribute else []
        if tag == "a":
            self.links.append(attribute["href"])
        else:
            self.fetched += [attribute[name] for name in ("src", "href") if name in attribute]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in VOID, tag

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag


def everything(words: str) -> list[Section]:
    curve = line_chart(
        [Line(words, [1, 2, 3], [3.0, 2.0, 1.0])],
        words,
        ChartStyle(readable=True),
        marks=[Annotation(2, "1", words, "card")],
    )
    strip = Strip(
        words,
        (StripSegment(0.5, 2, words), StripSegment(0.5, -1, words)),
        words,
        (Annotation(0.5, "1", words, "card"),),
    )
    table = TextTable(((words, words), (words, words)))
    blocks = (
        Paragraph(words), Points((words,)), table, Picture("p", curve.svg, words, words), Code(words), Code(words, title=words),
        FigureTiles((Tile(words, words, words, "bad"),)), Strips((strip,), ((2, words, words),)),
        Card("card", words, ((words, words),), (Paragraph(words),)), Grid((table,)), Fold(words, (table,)),
        Tabs("way", ((words, (table,)), (words, (table,)))),
    )  # fmt: skip
    return [Section("", blocks), Section(words, ())]


def test_every_block_is_escaped_and_closed():
    found = Balanced(page(BAD, everything(BAD)))
    assert found.tags.count("script") == 1, "the page's own alone"
    assert found.fetched == [] and set(found.links) == {"#card"} and found.ids.count("card") == 1
    assert found.tags == Balanced(page("x", everything("x"))).tags


def test_markdown_holds_what_is_not_folded():
    text = markdown("Title", everything("words"))
    assert text.count("| words | words |") == 6 and "### words" in text and "![words](plots/p.svg)" in text


def test_a_page_without_curves_has_no_script():
    assert "<script" not in page("x", [Section("y", (Paragraph("z"),))])


def test_thinning_keeps_extremes_ends_and_gaps():
    values = np.sin(np.arange(100_000) / 50)
    values[[123, 77_777]] = 9.0, -9.0
    values[50_000:50_010] = np.nan
    points = np.stack([np.arange(100_000.0), values], axis=1)
    thinned = thin_points(points, 400)
    assert len(thinned) < 1300 and np.isnan(thinned[:, 1]).sum() >= 1
    assert {0.0, 123.0, 77_777.0, 99_999.0} <= set(thinned[:, 0].tolist())
    assert (np.diff(thinned[:, 0]) > 0).all()
    assert thin_points(points[:300], 400) is not None and len(thin_points(points[:300], 400)) == 300


def test_values_that_are_not_finite_are_gaps():
    drawn = line_chart([Line("a", [1, 2, 3, 4, 5], [1.0, 2.0, math.nan, 4.0, 5.0])], "step").svg
    assert re.search(r'<path d="M[\d. L]+M[\d. L]+" stroke-linejoin', drawn)
    alone = line_chart([Line("a", [1, 2, 3], [1.0, math.inf, 3.0], marked=False)], "step").svg
    assert alone.count("<circle") == 2 and "nan" not in alone and "inf" not in alone
    assert "nothing to draw" in line_chart([Line("a", [1], [math.nan])], "step").svg
    assert "nothing to draw" in line_chart([], "step").svg


def test_one_point_huge_values_and_flat_lines_are_drawn():
    for y in ([5.0], [5.0, 5.0], [1e300, -1e300], [1e-300, 1e-299], [0.0, 0.0], [-1e15, -1e15 + 1]):
        for logarithmic in (False, True):
            drawn = line_chart(
                [Line("a", range(len(y)), y)], "step", ChartStyle(logarithmic=logarithmic, readable=True)
            ).svg
            assert "nan" not in drawn and "inf" not in drawn


def test_ticks_are_round_and_few():
    for low, high in ((0.0, 1.0), (3.0, 3.0), (-5.0, 1e9), (1e-12, 2e-12), (99.999, 100.001), (1e15, 1e15 + 4)):
        assert len(ticks(low, high)) <= 11
        assert all(low - abs(high - low) * 1e-6 <= tick <= high + abs(high - low) * 1e-6 for tick in ticks(low, high))
    assert all(2 <= len(logarithmic_ticks(low, high)) <= 13 for low, high in ((1e-12, 1e12), (0.9, 1.1), (1.0, 1000.0)))
    assert number(112_000) == "112k" and number(-0.5) == "-0.5"


def test_the_page_needs_no_jax():
    program = "import sys, panax, panax.metrics.page.html; assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_line_of_one_point_has_a_dot_in_the_legend_and_an_axis_that_counts_by_powers():
    lines = [Line("goodput", [1.0, 10.0, 1000.0], [1.0, 2.0, 3.0], marked=False), Line("now", [10.0], [2.0])]
    drawn = line_chart(
        lines, "devices", ChartStyle(logarithmic_x=True, titles_above=True, readable=True, width=460)
    ).svg
    across = re.findall(r'<circle cx="([\d.]+)"', drawn)
    # In the legend, and where a third of the powers of ten are.
    assert len(across) == 2 and float(across[1]) == pytest.approx(52 + (460 - 26 - 52) / 3, abs=0.1)
    assert "data-logarithmic-x=1>" in drawn and ">100<" in drawn


@pytest.mark.parametrize(
    "title", ["loss", "replica 2 tensor 2 context 2", "a title for which half of the width is not enough " * 2]
)
def test_no_title_is_cut_off(title):
    lines = [Line(title, [1, 2], [1.0, 2.0]), Line("b", [1, 2], [2.0, 1.0])]
    drawn = line_chart(lines, "step").svg
    at = {
        text: float(x)
        for x, text in re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="start"[^>]*>([^<]+)</text>', drawn)
    }
    assert at[title] + CHARACTER_WIDTH * len(title) <= 760 or at[title] < 60
    assert drawn.count("<path") >= 4


def test_what_hardly_changes_is_drawn_flat():
    drawn = line_chart([Line("memory", [1, 2, 3], [0.6518, 0.6521, 0.652])], "step").svg
    heights = [
        float(y) for _, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", re.findall(r'<path d="(M[^"]+L[^"]+)"', drawn)[0])
    ]
    assert max(heights) - min(heights) < 10
