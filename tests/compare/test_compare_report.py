"""The report's files: whole, self-contained, and true to the figures."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest
from comparing import COMPILED, EAGER, MACHINE, OWN, column, comparison

from panax_compare.columns import COLUMNS
from panax_compare.published_study import FLAWS, Published, variants
from panax_compare.report import write_report
from panax_compare.report.plots import ColumnBar, bars, lines
from panax_compare.report.published_report import answers, write_published
from panax_compare.workload.sources import count_code_lines, count_column_lines, read_source

VOID = {"meta", "path", "circle"}


class Balanced(HTMLParser):
    """Fails on tags that don't close each other."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.addresses += [value for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag in VOID, tag

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag


ABSENT = dataclasses.replace(
    column("torch_xla", "PyTorch/XLA", "torch", ()),
    state="absent",
    losses=[],
    peak_bytes=None,
    first_step_seconds=None,
    reason="torch_xla is not installed; run: pip install torch_xla",
)


def test_the_page_needs_nothing_else_and_closes_its_tags(tmp_path):
    page, table = write_report(comparison(EAGER, COMPILED, ABSENT, OWN), tmp_path)
    text = page.read_text(encoding="utf-8")
    parser = Balanced()
    parser.feed(text)
    assert parser.open == [] and parser.addresses == []
    assert (
        text.count("<svg") == 4
        and "http" not in text.replace("http://www.w3.org/2000/svg", "").partition("<details>")[0]
    )
    assert "| PyTorch/XLA | absent |" in table
    assert "torch.compile is the fastest" in table


def test_markdown_has_the_same_and_its_pictures_are_there(tmp_path):
    write_report(comparison(EAGER, COMPILED, ABSENT, OWN), tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^]]*\]\((plots/\w+\.svg)\)", text)
    assert len(pictures) == 4 and all((tmp_path / name).is_file() for name in pictures)
    assert "PyTorch/XLA: torch_xla is not installed; run: pip install torch_xla." in text
    assert "$ panax compare decoder" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {line.count(" | ") for line in rows[:6]} == {10}


def test_an_interrupted_comparison_states_what_is_missing(tmp_path):
    cut = dataclasses.replace(OWN, turns=OWN.turns[:2], state="pending")
    found = dataclasses.replace(comparison(EAGER, cut), complete=False)
    write_report(found, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "This comparison was interrupted" in text and "Panax: 1 of 3 rounds are missing." in text


def test_plots_hold_their_values():
    drawn = bars([ColumnBar("a", "A", 2.0, 1.0, 3.0, "two"), ColumnBar("b", "B", 4.0, 4.0, 4.0, "four")], "s")
    widths = [float(width) for width in re.findall(r'<rect [^>]*width="([\d.]+)"', drawn)]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)
    assert "nothing to draw" in lines({"a": ("A", [0.0])}, "step", logarithmic=True)
    assert lines({"a": ("A", [1.0, 2.0]), "limit": ("most", [3.0, 3.0])}, "step").count("<circle") == 2


def test_lines_are_counted_without_what_is_no_code():
    assert count_code_lines('"""Words.\n\nMore."""\n\nx = 1  # why\n\n\ny = [\n    1,\n]\n') == 4
    for name in COLUMNS:
        for family in name.families:
            length = count_column_lines(name, family)
            assert 5 < length.program < 120, name.name
            assert (length.model == 0) == (not name.families[family])
    assert all(
        read_source(file) for name in COLUMNS for family in name.families for file in sum(name.files(family), ())
    )


def published(**ratios):
    found = {
        name: {"torch": {"seconds": [1.0], "losses": [6.9]}, "jax": {"seconds": [ratio], "losses": [6.9]}}
        for name, ratio in ratios.items()
    }
    return Published({}, "panax compare vit --as-published", 3, 1, "a ViT", MACHINE, found)


def test_what_a_flaw_does_to_the_published_verdict():
    report = published(corrected=1.5, clock=0.1, data=1.55, published=0.5)
    report.found["labels"] = {"torch": {"error": "broke"}, "jax": {"seconds": [1.0], "losses": [3.4e6]}}
    said = answers(report)
    assert said[0].startswith("Result of the comparison without its flaws: JAX takes 1.50 times as long.")
    assert "the verdict turns round, the ratio is 0.50 instead of 1.50" in said[0]
    assert "clock read too soon: changes the ratio from 1.50 to 0.10." in said
    assert "data made in the timed loop: does not change the ratio by more than this run can show." in said
    assert "integer labels as distributions: not finished." in said
    assert said[-1].startswith("TF32 on one side: not shown")


def test_the_published_report(tmp_path):
    page, table = write_published(published(corrected=1.5, clock=0.1, published=0.5), tmp_path)
    parser = Balanced()
    parser.feed(page.read_text(encoding="utf-8"))
    assert parser.open == [] and "clock read too soon" in table


def test_every_flaw_is_shown_alone_and_all_together():
    assert [variant.name for variant in variants(True)] == ["corrected", *FLAWS, "published"]
    assert all("tf32" not in variant.flaws for variant in variants(False))
    assert variants(True)[-1].flaws == tuple(FLAWS)
