"""What a report is made of, before it is HTML or Markdown."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """Sentences."""

    text: str
    lead: bool = False


@dataclasses.dataclass(frozen=True)
class Points:
    """A list."""

    items: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells as text; the first row heads the columns.

    Attributes:
        marked: The row, counted from the first below the heading, that stands out.
        faint: Rows without figures.
    """

    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None
    faint: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Picture:
    """An SVG, with what it shows in words."""

    name: str
    svg: str
    caption: str


@dataclasses.dataclass(frozen=True)
class Code:
    """Text as it is; folded away under a title where it has one."""

    text: str
    language: str = ""
    title: str = ""


Block = Paragraph | Points | Table | Picture | Code


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: tuple[Block, ...]
