"""Self-contained HTML pages: styles, pictures and the script for the curves are included."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ...core.errors import DataError
from ...system.replacement import replace_file
from .blocks import (
    Block,
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
    Tabs,
    TextTable,
    Tile,
)
from .style import SCRIPT, STYLE


def page(title: str, sections: Sequence[Section]) -> str:
    """Return the complete page, with styles and pictures. Its script, which reads values out of curves, is
    optional."""
    body = "".join(
        f"<section>{f'<h2>{escape(section.title)}</h2>' if section.title else ''}{_blocks(section.blocks)}</section>"
        for section in sections
    )
    script = f"<script>{SCRIPT}</script>" if 'class="curve"' in body else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{body}</main>{script}</body></html>\n"
    )


def write_page(output: str | Path, title: str, sections: Sequence[Section], *, parents: bool = False) -> Path:
    """Write a page, replacing an existing file.

    Args:
        parents: True to create missing folders.

    Raises:
        DataError: The page can't be written.
    """
    path = Path(output)
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, page(title, sections))
    except OSError as error:
        raise DataError(
            f"can't write the page to {path}: {error.strerror or error}; choose another output file"
        ) from error
    return path


def _blocks(blocks: Sequence[Block]) -> str:
    return "".join(map(_block, blocks))


def _block(block: Block) -> str:
    match block:
        case Paragraph():
            kind = " class=lead" if block.lead else " class=faint" if block.faint else ""
            return f"<p{kind}>{_words(block.text)}</p>"
        case Points():
            return f"<ul>{''.join(f'<li>{_words(item)}</li>' for item in block.items)}</ul>"
        case TextTable():
            return _table(block)
        case Picture():
            title = f"<h3>{_words(block.title)}</h3>" if block.title else ""
            caption = f"<figcaption>{_words(block.caption)}</figcaption>" if block.caption else ""
            return f"<figure>{title}{block.svg}{caption}</figure>"
        case Code():
            text = f"<pre><code>{escape(block.text.rstrip())}</code></pre>"
            return f"<details><summary>{escape(block.title)}</summary>{text}</details>" if block.title else text
        case FigureTiles():
            return f'<div class="tiles">{"".join(map(_tile, block.items))}</div>'
        case Strips():
            return f'<div class="strips">{"".join(map(_strip, block.items))}{_legend(block.legend)}</div>'
        case Card():
            facts = "".join(
                f"<div><dt>{escape(name)}</dt><dd>{_words(value)}</dd></div>" for name, value in block.facts
            )
            return (
                f'<article class="card" id="{escape(block.anchor)}"><h3>{_words(block.title)}</h3><dl>{facts}</dl>'
                f"{_blocks(block.blocks)}</article>"
            )
        case Grid():
            return f'<div class="grid">{_blocks(block.blocks)}</div>'
        case Fold():
            return f"<details><summary>{escape(block.title)}</summary>{_blocks(block.blocks)}</details>"
        case Tabs():
            return _choice(block)


def _tile(tile: Tile) -> str:
    note = f"<span>{_words(tile.note)}</span>" if tile.note else ""
    tone = f' class="{escape(tile.tone)}"' if tile.tone else ""
    return f'<div class="tile"><span>{escape(tile.label)}</span><b{tone}>{_words(tile.value)}</b>{note}</div>'


def _strip(strip: Strip) -> str:
    """Draw a strip. Widths are percentages, so that the bar is as wide as the page."""
    drawn, at = [], 0.0
    for part in strip.parts:
        wide = part.share * strip.length * 100
        place = f'x="{at:.3f}%" y="0" width="{wide:.3f}%" height="22"'
        drawn.append(f'<rect class="f{part.color}" {place}><title>{escape(part.text)}</title></rect>')
        at += wide
    for mark in strip.marks:
        place = f"{mark.at * strip.length * 100:.3f}%"
        point = (
            f'<g class="mark"><title>{escape(mark.text)}</title><line x1="{place}" x2="{place}" y1="-5" y2="27" '
            f'stroke-width="1.5"/><circle cx="{place}" cy="-5" r="4"/></g>'
        )
        drawn.append(f'<a href="#{escape(mark.anchor)}">{point}</a>' if mark.anchor else point)
    head = (
        f"<p><strong>{_words(strip.title)}</strong><span>{_words(strip.note)}</span></p>"
        if strip.title or strip.note
        else ""
    )
    for at, words in strip.scale:
        place = f"{at * strip.length * 100:.3f}%"
        anchor = "end" if at > 0.94 else "middle" if at else "start"
        drawn.append(f'<line x1="{place}" x2="{place}" y1="22" y2="27" stroke="var(--soft)"/>')
        drawn.append(
            f'<text x="{place}" y="40" text-anchor="{anchor}" fill="var(--soft)" font-size="12">{escape(words)}</text>'
        )
    space = ' style="padding-top:9px"' if strip.marks else ""
    height = 44 if strip.scale else 22
    bar = f'<svg width="100%" height="{height}" role="img">{"".join(drawn)}</svg>'
    return f'<div class="strip">{head}<div{space}>{bar}</div></div>'


def _legend(legend: Sequence[tuple[int, str, str]]) -> str:
    if not legend:
        return ""
    items = (
        f'<span><i class="f{color}"></i>{escape(name)}{f"<b>{escape(figure)}</b>" if figure else ""}</span>'
        for color, name, figure in legend
    )
    return f'<div class="legend">{"".join(items)}</div>'


def _choice(choice: Tabs) -> str:
    if len(choice.ways) == 1:
        return _blocks(choice.ways[0][1])
    name = escape(choice.name)
    heads, ways = [], []
    for n, (title, blocks) in enumerate(choice.ways):
        chosen = "" if n else " checked"
        heads.append(
            f'<input type="radio" name="{name}" id="{name}-{n}"{chosen}><label for="{name}-{n}">{escape(title)}</label>'
        )
        ways.append(f'<div class="way">{_blocks(blocks)}</div>')
    return f'<div class="choice">{"".join(heads)}{"".join(ways)}</div>'


def _table(block: TextTable) -> str:
    head, *rows = block.rows
    show = escape if block.verbatim else _words
    lines = []
    for n, row in enumerate(rows):
        kind = ' class="marked"' if n == block.marked else ' class="faint"' if n in block.faint else ""
        lines.append(f"<tr{kind}>{''.join(f'<td>{show(cell)}</td>' for cell in row)}</tr>")
    wide = (
        ' class="verbatim"'
        if block.verbatim
        else ' class="wide"'
        if len(head) > 5
        else ' class="pairs"'
        if len(head) == 2
        else ""
    )
    headings = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    head_row = f"<thead><tr>{headings}</tr></thead>" if any(head) else ""
    return f'<div class="scroll"><table{wide}>{head_row}<tbody>{"".join(lines)}</tbody></table></div>'


def _words(text: str) -> str:
    """Escape a text, with `code` and **strong** words."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
