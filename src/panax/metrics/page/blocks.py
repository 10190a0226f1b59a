"""Content of a page, before it is HTML or Markdown."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """Sentences; a lead is larger, a faint one explains missing content."""

    text: str
    lead: bool = False
    faint: bool = False


@dataclasses.dataclass(frozen=True)
class Points:
    """A bulleted list."""

    items: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TextTable:
    """Cells as text; the first row is the header, omitted if it is empty.

    Attributes:
        marked: The highlighted row, counted from the first one below the header.
        faint: Rows without figures.
        verbatim: True if cells are texts of others: their lines are kept, and they have no `code` or **strong** words.
    """

    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None
    faint: tuple[int, ...] = ()
    verbatim: bool = False


@dataclasses.dataclass(frozen=True)
class Picture:
    """An SVG, with a caption.

    Attributes:
        name: Name of its file, if the page is Markdown.
        title: Title above the picture.
    """

    name: str
    svg: str
    caption: str = ""
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Code:
    """Preformatted text; collapsed under a title if it has one."""

    text: str
    language: str = ""
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Tile:
    """One prominent figure.

    Attributes:
        tone: "good", "bad", "busy" or empty; colors the value.
    """

    label: str
    value: str
    note: str = ""
    tone: str = ""


@dataclasses.dataclass(frozen=True)
class FigureTiles:
    """Figures side by side."""

    items: tuple[Tile, ...]


@dataclasses.dataclass(frozen=True)
class StripSegment:
    """A segment of a strip.

    Attributes:
        share: Share of the strip's whole length, from 0 to 1.
        color: Index of a color of the page (`svg.COLORS`), or -1 for gray.
        text: Tooltip.
    """

    share: float | int
    color: int
    text: str


@dataclasses.dataclass(frozen=True)
class Annotation:
    """A mark on a strip or a curve that is explained by a card on the page.

    Attributes:
        at: Position, from 0 to 1 on a strip; in the unit of the x axis on a curve.
        anchor: Anchor of the card.
    """

    at: float | int
    label: str
    text: str
    anchor: str = ""


@dataclasses.dataclass(frozen=True)
class Strip:
    """A bar of consecutive segments.

    Attributes:
        length: Length of the whole bar relative to the longest one, from 0 to 1.
        scale: (position from 0 to 1, label) below the bar.
    """

    title: str
    parts: tuple[StripSegment, ...]
    note: str = ""
    marks: tuple[Annotation, ...] = ()
    length: float | int = 1.0
    scale: tuple[tuple[float | int, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Strips:
    """Bars stacked vertically with one legend.

    Attributes:
        legend: (color, meaning, figure) for each kind of segment.
    """

    items: tuple[Strip, ...]
    legend: tuple[tuple[int, str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Card:
    """An event, with its figures.

    Attributes:
        anchor: Fragment of links to it: letters, digits and hyphens.
        facts: (label, value) pairs.
    """

    anchor: str
    title: str
    facts: tuple[tuple[str, str], ...]
    blocks: tuple[Block, ...] = ()


@dataclasses.dataclass(frozen=True)
class Grid:
    """Blocks side by side if the page is wide enough."""

    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Fold:
    """Blocks that are collapsed under a title."""

    title: str
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Tabs:
    """Alternative views of the same content to choose from; the first is shown.

    Attributes:
        name: Distinguishes it from the page's other tabs: letters, digits and hyphens.
        ways: (title, blocks) pairs.
    """

    name: str
    ways: tuple[tuple[str, tuple[Block, ...]], ...]


Block = Paragraph | Points | TextTable | Picture | Code | FigureTiles | Strips | Card | Grid | Fold | Tabs


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and its content; without a title, at the top of the page."""

    title: str
    blocks: tuple[Block, ...]
