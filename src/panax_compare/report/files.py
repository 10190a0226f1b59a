"""The report's files."""

from pathlib import Path

from panax.metrics.page.blocks import Picture, TextTable
from panax.metrics.page.html import page
from panax.metrics.page.markdown import markdown, table

from ..results import Comparison
from .content import sections_of, title_of

PAGE, MARKDOWN, PLOTS = "report.html", "report.md", "plots"


def write_report(comparison: Comparison, folder: Path) -> tuple[Path, str]:
    """Write the page, the Markdown file and its plots.

    Returns:
        The path of the page, and the table with the verdict, for the terminal.
    """
    if not comparison.work:
        return folder / PAGE, "nothing was measured\n"
    sections, title = sections_of(comparison), title_of(comparison)
    (folder / PLOTS).mkdir(exist_ok=True)
    for section in sections:
        for block in section.blocks:
            if isinstance(block, Picture):
                (folder / PLOTS / f"{block.name}.svg").write_text(block.svg, encoding="utf-8")
    (folder / PAGE).write_text(page(title, sections), encoding="utf-8")
    (folder / MARKDOWN).write_text(markdown(title, sections), encoding="utf-8")
    main = next(block for section in sections for block in section.blocks if isinstance(block, TextTable))
    lead = sections[0].blocks[0]
    return folder / PAGE, f"{table(main)}\n\n{getattr(lead, 'text', '')}\n"
