"""The report as one page that needs nothing else."""

import re
from collections.abc import Sequence
from html import escape

from .blocks import Block, Paragraph, Picture, Points, Section, Table

STYLE = """
:root { color-scheme: light dark; --ink: #1c2326; --soft: #5c686d; --line: #dde3e5; --page: #fbfcfc; --card: #fff;
  --mark: #e7f4ee; --accent: #0b6e4f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaeb; --soft: #9aa7ac; --line: #323b3f; --page: #14191b; --card: #1b2225;
  --mark: #163a2d; --accent: #4fc79a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 28px 80px; }
h1 { font-size: 32px; line-height: 1.2; letter-spacing: -.01em; margin: 0 0 8px; }
h2 { font-size: 20px; margin: 44px 0 12px; padding-top: 20px; border-top: 1px solid var(--line); }
p { max-width: 78ch; margin: 10px 0; }
p.lead { font-size: 19px; line-height: 1.5; }
ul { padding-left: 20px; max-width: 100ch; } li { margin: 4px 0; color: var(--soft); font-size: 14.5px; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12.5px; vertical-align: bottom; }
th, td { padding: 9px 12px; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; } td:first-child { font-weight: 600; white-space: nowrap; }
.wide td:not(:first-child) { white-space: nowrap; } tr.marked { background: var(--mark); }
tr.faint td { color: var(--soft); font-weight: 400; }
figure { margin: 18px 0; padding: 18px; background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
figure svg { max-width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: 14px; margin-top: 10px; }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px;
  font-size: 13px; line-height: 1.45; }
code { font-family: ui-monospace, SFMono-Regular, Menlo, monospace; font-size: .92em; }
details { margin: 8px 0; } summary { cursor: pointer; color: var(--accent); font-weight: 600; font-size: 14.5px; }
"""


def page(title: str, sections: Sequence[Section]) -> str:
    """The whole page, styles and pictures inside."""
    body = "".join(
        f"<section><h2>{escape(section.title)}</h2>{''.join(map(_block, section.blocks))}</section>"
        for section in sections
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main><h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )


def _block(block: Block) -> str:
    if isinstance(block, Paragraph):
        return f"<p{' class=lead' if block.lead else ''}>{_words(block.text)}</p>"
    if isinstance(block, Points):
        return f"<ul>{''.join(f'<li>{_words(item)}</li>' for item in block.items)}</ul>"
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Picture):
        return f"<figure>{block.svg}<figcaption>{_words(block.caption)}</figcaption></figure>"
    text = f"<pre><code>{escape(block.text.rstrip())}</code></pre>"
    return f"<details><summary>{escape(block.title)}</summary>{text}</details>" if block.title else text


def _table(block: Table) -> str:
    head, *rows = block.rows
    lines = []
    for n, row in enumerate(rows):
        kind = ' class="marked"' if n == block.marked else ' class="faint"' if n in block.faint else ""
        lines.append(f"<tr{kind}>{''.join(f'<td>{_words(cell)}</td>' for cell in row)}</tr>")
    wide = ' class="wide"' if len(head) > 5 else ""
    headings = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f'<div class="scroll"><table{wide}><thead><tr>{headings}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _words(text: str) -> str:
    """Escaped, with `code` and **strong** words."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
