"""Conversion of a page to a notebook, and of a notebook's outputs back to the page."""

import re
from collections.abc import Sequence
from pathlib import Path

from nbformat import NotebookNode, v4

from . import files
from .outputs import picture_of, shorten_text, text_of
from .source import Block, Page, TutorialError, commands

IMAGES = "docs/images"

_DIRECTIVE = re.compile(r"^<!-- (?:shortened: .*?|varies) ?-->\n?", re.M)


def build_notebook(page: Page) -> NotebookNode:
    """Convert a page to a notebook without outputs. The same page gives the same bytes.

    Raises:
        TutorialError: The page speaks of a file that is not prepared.
    """
    cells = []
    for part in page.parts:
        if isinstance(part, Block):
            cells.append(v4.new_code_cell(cell_source(part, page.path)))
        elif prose := _DIRECTIVE.sub("", part).strip():
            cells.append(v4.new_markdown_cell(prose))
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return v4.new_notebook(cells=cells, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def cell_source(block: Block, path: Path) -> str:
    """Return the code of a block's cell."""
    if block.kind == "file":
        return f"%%writefile {block.file}\n{block.text}".rstrip()
    if block.kind == "console":
        return "\n".join(_cell_line(command) for command in commands(block, path))
    if block.kind == "files":
        try:
            return files.cell_source(block.text)
        except KeyError as error:
            raise TutorialError(
                f"{path}:{block.line}: {error.args[0]!r} is not prepared; expected one of {', '.join(files.WRITERS)}"
            ) from None
    return block.text.rstrip()


def _cell_line(command: str) -> str:
    # A variable that is exported in one shell would be gone in the next.
    exported = re.fullmatch(r"export (\w+)=(\S+)", command)
    return f"%env {exported[1]}={exported[2]}" if exported else f"!{command}"


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Return a notebook's code cells, one for each block of its page."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def copy_outputs(source: NotebookNode, target: NotebookNode) -> None:
    """Copy the outputs of a notebook into one with the same code."""
    for old, new in zip(code_cells(source), code_cells(target), strict=True):
        new.outputs, new.execution_count = old.outputs, old.execution_count


def has_same_code(first: NotebookNode, second: NotebookNode) -> bool:
    """Return True if two notebooks have the same code cells."""
    return [cell.source for cell in code_cells(first)] == [cell.source for cell in code_cells(second)]


def render_page(page: Page, notebook: NotebookNode) -> tuple[str, dict[str, str]]:
    """Write a notebook's outputs into its page.

    Returns:
        The page's text, and the pictures that it shows: contents by file name in `docs/images`.

    Raises:
        TutorialError: An output can't be written as a fenced block.
    """
    pictures: dict[str, str] = {}
    shown = []
    for block, cell in zip(page.blocks, code_cells(notebook), strict=True):
        # Which file was written is on the page already.
        outputs: Sequence[NotebookNode] = cell.outputs if block.kind in ("python", "console") else ()
        shown.append("".join(_render_output(output, block, page, pictures) for output in outputs))
    return page.with_outputs(shown), pictures


def _render_output(output: NotebookNode, block: Block, page: Page, pictures: dict[str, str]) -> str:
    if picture := picture_of(output):
        name = f"tutorial-{page.path.stem}-{len(pictures) + 1}.svg"
        pictures[name] = picture
        return f"\n<!-- output -->\n![Chart drawn by the block above](../images/{name})\n"
    text = shorten_text(text_of(output))
    if "```" in text:
        raise TutorialError(f"{page.path}:{block.line}: the output contains ```, which ends a fenced block")
    return f"\n<!-- output -->\n```text\n{text}\n```\n" if text else ""
