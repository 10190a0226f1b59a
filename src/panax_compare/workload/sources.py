"""Length of each column's program, counted from the files that ran."""

import ast
import io
import tokenize
from pathlib import Path
from typing import NamedTuple

from ..columns import Column
from .compared_work import Family

FOLDER = Path(__file__).parents[1] / "columns"


class CodeLength(NamedTuple):
    """Lines of code: without blank lines, comments and docstrings.

    Attributes:
        program: Lines of preparation, step and optimizer.
        model: Lines of the model that a user would have to write; 0 for a library's model.
    """

    program: int
    model: int


def count_column_lines(column: Column, family: Family) -> CodeLength:
    """Count a column's lines for a family of models."""
    program, model = column.files(family)
    return CodeLength(
        sum(count_code_lines(read_source(name)) for name in program),
        sum(count_code_lines(read_source(name)) for name in model),
    )


def read_source(name: str) -> str:
    """Read the text of a column's file."""
    return FOLDER.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8")


def count_code_lines(text: str) -> int:
    """Count the lines that hold code.

    >>> count_code_lines('def f():\\n    \\"\\"\\"Say nothing.\\"\\"\\"\\n    # why\\n    return (\\n        1)\\n')
    3
    """
    documented = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            first = node.body[0]
            documented |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code_lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            code_lines |= set(range(token.start[0], token.end[0] + 1))
    return len(code_lines - documented)
