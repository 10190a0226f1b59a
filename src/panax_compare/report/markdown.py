"""The report as Markdown: pictures are files beside it."""

from collections.abc import Sequence

from .blocks import Block, Code, Paragraph, Picture, Points, Section, Table


def markdown(title: str, sections: Sequence[Section]) -> str:
    """The whole page. Programs, which lie in the repository, are left out."""
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [text for block in section.blocks if (text := _block(block))]
    return "\n\n".join(parts) + "\n"


def table(block: Table) -> str:
    """Rows of a Markdown table."""
    head, *rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in block.rows]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _block(block: Block) -> str:
    if isinstance(block, Paragraph):
        return block.text
    if isinstance(block, Points):
        return "\n".join(f"- {item}" for item in block.items)
    if isinstance(block, Table):
        return table(block)
    if isinstance(block, Picture):
        return f"![{block.caption}](plots/{block.name}.svg)"
    if block.title:
        return ""
    return _fence(block)


def _fence(block: Code) -> str:
    prompt = "$ " if block.language == "console" else ""
    return f"```{block.language}\n{prompt}{block.text.rstrip()}\n```"
