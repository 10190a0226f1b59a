"""The Markdown pages of the project, cut into their code blocks."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


class Fence(NamedTuple):
    """A fenced block.

    Attributes:
        line: Of its first line in the page.
    """

    language: str
    text: str
    line: int


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fences(page: Path) -> list[Fence]:
    text = page.read_text(encoding="utf-8")
    return [Fence(m.group(1), m.group(2), text.count("\n", 0, m.start()) + 2) for m in _FENCED.finditer(text)]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCED.sub("", page.read_text(encoding="utf-8"))


def relative_links(page: Path) -> Iterator[str]:
    for target in _LINK.findall(prose(page)):
        if "://" not in target:
            yield target


def anchors(page: Path) -> set[str]:
    """Return what a link may have after the `#`: headings of the page, and explicit anchors."""
    text = prose(page)
    headings = {re.sub(r"[^\w\- ]", "", each.lower()).strip().replace(" ", "-") for each in _HEADING.findall(text)}
    return headings | set(re.findall(r'<a id="([^"]+)">', text))


def table_rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of every row of the tables whose first heading cell reads `heading`."""
    rows: list[list[str]] = []
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            inside = False
        elif cells[0] == heading:
            inside = True
        elif inside and not set(cells[0]) <= set("-: "):
            rows.append(cells)
    assert rows, f"{name_of(page)} has no table with the heading {heading!r}"
    return rows
