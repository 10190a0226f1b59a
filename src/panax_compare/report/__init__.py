"""The report of a comparison: one page, one Markdown file, the same content."""

from .files import write_report

__all__ = ["write_report"]
