"""The site's navigation, from the sections and lists of docs/index.md.

The pages stay plain Markdown: what Sphinx needs beside it, a `toctree`, is added while it reads them.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

INDEX = "index"

_SECTION = re.compile(r"^## (.+)$")
_ITEM = re.compile(r"^( *)- ")
_LINK = re.compile(r"\]\(([^)#\s]+)\.md(?:#[^)\s]*)?\)")


class Navigation(NamedTuple):
    """Pages by their names, which are paths below docs/ without `.md`.

    Attributes:
        sections: The pages directly below each heading of the index.
        children: The pages below a page.
    """

    sections: Mapping[str, list[str]]
    children: Mapping[str, list[str]]

    def pages(self) -> Iterator[str]:
        """Yield every page, the index first."""
        yield INDEX
        for top in self.sections.values():
            for page in top:
                yield from self._below(page)

    def _below(self, page: str) -> Iterator[str]:
        yield page
        for child in self.children.get(page, ()):
            yield from self._below(child)


def read_navigation(docs: Path) -> Navigation:
    """Read the navigation: each list item's first link, nested as the items are, and the pages of folders below their index."""
    sections: dict[str, list[str]] = {}
    children: dict[str, list[str]] = {}
    placed = {INDEX}
    for caption, depth, item in _items((docs / f"{INDEX}.md").read_text("utf-8")):
        link = _LINK.search(item)
        if link is None or link[1] in placed or not (docs / f"{link[1]}.md").is_file():
            continue
        placed.add(link[1])
        top = sections.setdefault(caption, [])
        (children.setdefault(top[-1], []) if depth and top else top).append(link[1])
    for folder in sorted(path for path in docs.iterdir() if path.is_dir()):
        _place_folder(docs, folder.name, placed, sections, children)
    return Navigation(sections, children)


def _items(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield the list items of an index: the section's heading, the indentation, the text with its continuation lines."""
    caption, depth, lines = "", 0, []
    for line in [*text.splitlines(), ""]:
        item, section = _ITEM.match(line), _SECTION.match(line)
        if lines and (item or section or not line.strip()):
            yield caption, depth, "\n".join(lines)
            lines = []
        if section:
            caption = section[1]
        elif item:
            depth, lines = len(item[1]), [line]
        elif lines:
            lines.append(line)


def _place_folder(
    docs: Path, folder: str, placed: set[str], sections: dict[str, list[str]], children: dict[str, list[str]]
) -> None:
    """Put a folder's pages below its index or the page of its name, or into the section that has others of them."""
    parent = f"{folder}/{INDEX}"
    if not (docs / f"{parent}.md").is_file():
        parent = folder
    elif parent not in placed and folder in placed:
        children.setdefault(folder, []).append(parent)
        placed.add(parent)
    pages = {f"{folder}/{path.stem}": None for path in sorted((docs / folder).glob("*.md"))}
    if parent in placed:
        links = [f"{folder}/{name}" for name in _LINK.findall((docs / f"{parent}.md").read_text("utf-8"))]
        siblings = children.setdefault(parent, [])
    else:
        links = []
        siblings = next((top for top in sections.values() if any(page in pages for page in top)), [])
    order = [*(link for link in links if link in pages), *pages]
    new = [page for page in dict.fromkeys(order) if page not in placed]
    placed.update(new)
    siblings += new


def toctrees(page: str, navigation: Navigation) -> str:
    """Return what is added to a page's text for the pages below it."""
    groups = navigation.sections if page == INDEX else {"": navigation.children.get(page, [])}
    return "".join(_toctree(caption, names) for caption, names in groups.items() if names)


def _toctree(caption: str, names: list[str]) -> str:
    options = [":hidden:", ":titlesonly:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "", "```{toctree}", *options, "", *(f"/{name}" for name in names), "```", ""])
