"""Functions and classes of a Python source without comments and docstrings: code alone."""

import ast
import re
import warnings
from collections.abc import Iterator

_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LINE_END = re.compile(r"\r\n|\r|\n")
"""Line ends as the parser counts them: a form feed is not one, unlike for `str.splitlines`."""


def extract_definitions(source: str) -> Iterator[str]:
    r"""Yield each function and class of the module's top level, without decorators, docstrings and comment
    lines.

    A docstring that is the entire body is not removed.

    Raises:
        SyntaxError: This Python can't parse the source.

    >>> list(extract_definitions('import os\n\nclass A:\n    "Say."\n\n    # Why.\n    x = 1\n\ndef f(): return 2\n'))
    ['class A:\n    x = 1\n', 'def f(): return 2\n']
    """
    with warnings.catch_warnings():
        # Escapes in strings that a later Python rejects do not matter to a reader.
        warnings.simplefilter("ignore")
        module = ast.parse(source)
    lines = _LINE_END.split(source)
    for number in _docstring_lines(module):
        lines[number] = "#"
    for node in module.body:
        if isinstance(node, _Definition) and node.end_lineno is not None:
            yield "".join(f"{line}\n" for line in _code(lines[node.lineno - 1 : node.end_lineno]))


def _code(lines: list[str]) -> Iterator[str]:
    """Yield the lines except comments, and the blank ones after them."""
    left_out = False
    for line in lines:
        left_out = line.lstrip().startswith("#") or (left_out and not line.strip())
        if not left_out:
            yield line


def _docstring_lines(module: ast.Module) -> Iterator[int]:
    """Yield the indices of the lines that consist of docstrings, of all functions and classes, including
    nested ones."""
    bodies = [node for node in module.body if isinstance(node, _Definition)]
    while bodies:
        body = bodies.pop().body
        bodies += [node for node in body if isinstance(node, _Definition)]
        first = body[0]
        if (
            len(body) > 1
            and isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
            and first.end_lineno is not None
            and first.end_lineno < body[1].lineno
        ):
            yield from range(first.lineno - 1, first.end_lineno)
