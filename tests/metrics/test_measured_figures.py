"""Measured figures are compared by `core.finite`: where losses, times and rates are, `min`, `max` and `sorted` need a reason."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

FILES = [
    *sorted(SOURCE.glob("panax/metrics/report/*.py")),
    *(
        SOURCE / "panax" / name
        for name in ("run/tools/sweep.py", "cli/commands/sweep.py", "run/tools/lr_search.py", "run/tools/lr_page.py")
    ),
    *sorted(SOURCE.rglob("panax_compare/**/*.py")),
]

EXCEPTIONS = {
    "max(steps, default=None)": "whole numbers of steps",
    "max(((path / name).stat().st_mtime ": "times of files",
    "max((part for part in module.modules() ": "lengths of lists",
    "max(entry.sent_bytes, default=None)": "counted bytes",
    "min((int(line) for ": "whole numbers",
    "min((len(leaf) for ": "lengths of arrays",
    "min(finite_values)": "only finite ones are in it",
    "min(seconds)": "a column's own process measures them, where Panax may not be installed; clocks give no NaN",
    "sorted((str(each) for ": "names",
    "sorted(arrivals, key=order.index)": "an order of names",
    "sorted(batch": "whole numbers, and names",
    "sorted(collected)": "names",
    "sorted(newest)": "names and step numbers",
    "sorted(glob.glob(": "names",
    "sorted(kinds, key=lambda kind: list(KINDS)": "an order of names",
    "sorted(os.sched_getaffinity(": "whole numbers",
    "sorted(self.comparison.columns.items(), key=lambda item: order.index": "an order of names",
    "sorted(spent, key=lambda kind: list(KINDS)": "an order of names",
}
"""How a call begins that may stand there, and why."""


def is_allowed(call: str) -> bool:
    return call.startswith(tuple(EXCEPTIONS))


def comparisons_in(source: str) -> list[str]:
    """Each call that picks from or orders several values; two arguments bound one value by another."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id in ("min", "max", "sorted"))
            or (isinstance(node.func, ast.Attribute) and node.func.attr in ("sort", "nanmin", "nanmax"))
        )
        and len(node.args) < 2
    ]


def test_measured_figures_are_compared_by_the_helper():
    found = {
        f"{path.relative_to(SOURCE)}: {call}"
        for path in FILES
        for call in comparisons_in(path.read_text(encoding="utf-8"))
        if not is_allowed(call)
    }
    assert not found, "use least, greatest and ascending of panax.core.finite_stats: a figure may be NaN"


@pytest.mark.parametrize(
    "planted",
    ["min(losses)", "sorted(rows, key=loss_of)", "max((r.loss for r in rows), default=0)", "rows.sort()"],
)
def test_another_comparison_is_seen(planted):
    (seen,) = comparisons_in(f"best = {planted}\n")
    assert seen == planted and not is_allowed(seen)


def test_exceptions_are_still_needed():
    there = {call for path in FILES for call in comparisons_in(path.read_text(encoding="utf-8"))}
    assert [begin for begin in EXCEPTIONS if not any(call.startswith(begin) for call in there)] == []
