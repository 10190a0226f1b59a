"""What a page is made of, before it is HTML or Markdown."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """Sentences; a lead is larger, a faint one says what is missing."""

    text: str
    lead: bool = False
    faint: bool = False


@dataclasses.dataclass(frozen=True)
class Points:
    """A list."""

    items: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TextTable:
    """Cells as text; the first row heads the columns, and is left out where it is empty.

    Attributes:
        marked: The row, counted from the first below the heading, that stands out.
        faint: Rows without figures.
    """

    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None
    faint: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Picture:
    """An SVG, with what it shows in words.

    Attributes:
        name: Of its file, where the page is Markdown.
        title: Above the picture.
    """

    name: str
    svg: str
    caption: str = ""
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Code:
    """Text as it is; folded away under a title where it has one."""

    text: str
    language: str = ""
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Tile:
    """One figure that is seen at once.

    Attributes:
        tone: "good", "bad", "busy" or empty; colours the value.
    """

    label: str
    value: str
    note: str = ""
    tone: str = ""


@dataclasses.dataclass(frozen=True)
class FigureTiles:
    """Figures beside each other."""

    items: tuple[Tile, ...]


@dataclasses.dataclass(frozen=True)
class StripSegment:
    """A piece of a strip.

    Attributes:
        share: Of the strip's whole length, from 0 to 1.
        colour: Number of a colour of the page (`svg.COLOURS`), or -1 for grey.
        text: What is said of it where the reader points at it.
    """

    share: float | int
    colour: int
    text: str


@dataclasses.dataclass(frozen=True)
class Annotation:
    """A place on a strip or a curve that a card on the page tells of.

    Attributes:
        at: From 0 to 1 on a strip; in the unit of the x axis on a curve.
        anchor: The card's.
    """

    at: float | int
    label: str
    text: str
    anchor: str = ""


@dataclasses.dataclass(frozen=True)
class Strip:
    """A bar of parts, one after the other.

    Attributes:
        length: Of the whole bar beside the longest one, from 0 to 1.
        scale: (place from 0 to 1, what stands there) below the bar.
    """

    title: str
    parts: tuple[StripSegment, ...]
    note: str = ""
    marks: tuple[Annotation, ...] = ()
    length: float | int = 1.0
    scale: tuple[tuple[float | int, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Strips:
    """Bars below each other with one legend.

    Attributes:
        legend: (colour, what it stands for, figure) for each kind of part.
    """

    items: tuple[Strip, ...]
    legend: tuple[tuple[int, str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Card:
    """A thing that happened, with its figures.

    Attributes:
        anchor: What links to it say after the `#`: letters, digits and hyphens.
        facts: (label, value) pairs.
    """

    anchor: str
    title: str
    facts: tuple[tuple[str, str], ...]
    blocks: tuple[Block, ...] = ()


@dataclasses.dataclass(frozen=True)
class Grid:
    """Blocks beside each other where the page is wide enough."""

    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Fold:
    """Blocks that are folded away under a title."""

    title: str
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Tabs:
    """The same content in several ways, of which the reader picks one; the first is shown.

    Attributes:
        name: Tells it from the page's other choices: letters, digits and hyphens.
        ways: (title, blocks) pairs.
    """

    name: str
    ways: tuple[tuple[str, tuple[Block, ...]], ...]


Block = Paragraph | Points | TextTable | Picture | Code | FigureTiles | Strips | Card | Grid | Fold | Tabs


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and what stands below it; without a title it stands at the top of the page."""

    title: str
    blocks: tuple[Block, ...]
