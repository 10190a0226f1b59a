"""A tutorial's files: its page, its notebook and its pictures; which are out of date, and how they are renewed."""

from pathlib import Path

import nbformat
from nbformat import NotebookNode

from .execution import execute
from .notebooks import IMAGES, build_notebook, code_cells, copy_outputs, has_same_code, render_page
from .outputs import find_difference
from .source import Page, read_page


def outdated(path: Path, root: Path) -> list[Path]:
    """Return the files of a tutorial that do not agree with its page and its notebook's outputs; nothing is executed."""
    page = read_page(path)
    recorded = read_notebook(path)
    new = build_notebook(page)
    if recorded is None or not has_same_code(recorded, new):
        return [notebook_path(path)]
    copy_outputs(recorded, new)
    return [each for each, text in _files(page, new, root).items() if _read(each) != text]


def renew(path: Path, root: Path, *, execute_always: bool = False) -> list[Path]:
    """Write the files of a tutorial that are out of date, and return them.

    Args:
        execute_always: Execute even if the code has not changed since the notebook was executed.

    Raises:
        TutorialError: A cell failed; nothing is written then.
    """
    page = read_page(path)
    recorded = read_notebook(path)
    new = build_notebook(page)
    if recorded is None or execute_always or not has_same_code(recorded, new):
        execute(page, new)
    else:
        copy_outputs(recorded, new)
    stale = {each: text for each, text in _files(page, new, root).items() if _read(each) != text}
    for each, text in stale.items():
        each.write_text(text, "utf-8")
    return list(stale)


def find_changes(path: Path) -> list[str]:
    """Execute a tutorial as it is on its page, and describe where its outputs differ from those of its notebook.

    Raises:
        TutorialError: A cell failed.
    """
    page = read_page(path)
    recorded = read_notebook(path)
    if recorded is None:
        return [f"{path} has no notebook"]
    new = build_notebook(page)
    execute(page, new)
    found = []
    for block, old, fresh in zip(page.blocks, code_cells(recorded), code_cells(new), strict=True):
        if not block.varies and (difference := find_difference(old.outputs, fresh.outputs)):
            found.append(f"{path.name}:{block.line}: {difference}")
    return found


def read_notebook(path: Path) -> NotebookNode | None:
    """Read a page's notebook; None if it has none."""
    notebook = notebook_path(path)
    return nbformat.read(notebook, as_version=4) if notebook.exists() else None


def notebook_path(path: Path) -> Path:
    """Return the file of a page's notebook."""
    return path.with_suffix(".ipynb")


def _files(page: Page, notebook: NotebookNode, root: Path) -> dict[Path, str]:
    """Return the text of each file of a tutorial."""
    text, pictures = render_page(page, notebook)
    return {
        page.path: text,
        notebook_path(page.path): nbformat.writes(notebook) + "\n",
        **{root / IMAGES / name: picture for name, picture in pictures.items()},
    }


def _read(path: Path) -> str | None:
    return path.read_text("utf-8") if path.exists() else None
