"""Pages as Markdown: pictures are files in the same folder."""

from collections.abc import Sequence

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
    Strips,
    Tabs,
    TextTable,
)


def markdown(title: str, sections: Sequence[Section]) -> str:
    """Return the complete page, without content that is collapsed on the HTML page."""
    parts = [f"# {title}"]
    for section in sections:
        parts += [f"## {section.title}"] if section.title else []
        parts += [text for block in section.blocks if (text := _block(block))]
    return "\n\n".join(parts) + "\n"


def table(block: TextTable) -> str:
    """Return a Markdown table."""
    head, *rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in block.rows]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _block(block: Block) -> str:
    match block:
        case Paragraph():
            return block.text
        case Points():
            return _points(block.items)
        case TextTable():
            return table(block)
        case Picture():
            return f"![{block.caption or block.title}](plots/{block.name}.svg)"
        case Code():
            return "" if block.title else _fence(block)
        case FigureTiles():
            return _points([" ".join(filter(None, (f"{each.label}: {each.value}", each.note))) for each in block.items])
        case Strips():
            return _points([" ".join(filter(None, (f"{name}:", figure))) for _, name, figure in block.legend])
        case Card():
            facts = _points([f"{name}: {value}" for name, value in block.facts])
            return "\n\n".join([f"### {block.title}", facts, *filter(None, map(_block, block.blocks))])
        case Grid():
            return "\n\n".join(filter(None, map(_block, block.blocks)))
        case Tabs():
            return "\n\n".join(filter(None, map(_block, block.ways[0][1])))
        case Fold():
            return ""


def _points(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _fence(block: Code) -> str:
    prompt = "$ " if block.language == "console" else ""
    return f"```{block.language}\n{prompt}{block.text.rstrip()}\n```"
