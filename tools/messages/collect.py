"""Messages in the sources: errors that a user can cause, warnings, and notes."""

import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BASE = "PanaxError"
WARNINGS = frozenset({"warn", "say"})
"""Functions that report without raising: `warnings.warn`, and the `say` that commands pass down."""

SETTING = re.compile(r"(?<![\w.])([a-z][a-z_]*(?:\.[a-z_]+)*)=(?=‹|\S)")
MAX_EXPRESSION = 40
"""Characters of a placeholder; a longer expression is an ellipsis."""


class Message(NamedTuple):
    """A message, and where it is raised.

    Attributes:
        kind: Class of the error, or `warning`.
        wording: Its text, with the expressions of an f-string as ‹expression›.
        path: File below `src`.
        function: Qualified name within the file; "" at the level of the module.
        setting: Dotted path of the first setting that it names, or "".
    """

    kind: str
    wording: str
    path: str
    function: str
    setting: str

    @property
    def anchor(self) -> str:
        """Identifier of the wording, the same wherever it is raised."""
        return hashlib.sha256(self.wording.encode()).hexdigest()[:8]


def collect(source: Path) -> list[Message]:
    """Return all messages of a source tree, in the order of files and lines."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(source.rglob("*.py"))}
    errors = _error_classes(list(trees.values()))
    return [
        message
        for path, tree in trees.items()
        for message in _messages(tree, path.relative_to(source).as_posix(), errors)
    ]


def _error_classes(trees: list[ast.Module]) -> set[str]:
    """Return the names of all classes that derive from `PanaxError`."""
    bases = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    errors = {BASE}
    while new := {name for name, above in bases.items() if errors & set(above)} - errors:
        errors |= new
    return errors


def _messages(tree: ast.Module, path: str, errors: set[str]) -> Iterator[Message]:
    for function, call in _calls(tree, ""):
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if not call.args or name not in errors | WARNINGS:
            continue
        wording = " ".join(template(call.args[0]).split())
        if " " in re.sub("‹.*?›", "", wording).strip():
            setting = SETTING.search(wording)
            yield Message(
                "warning" if name in WARNINGS else name, wording, path, function, setting[1] if setting else ""
            )


def _calls(node: ast.AST, inside: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call with the qualified name of the function that it stands in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield inside, child
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _calls(child, f"{inside}.{child.name}".lstrip(".") if named else inside)


def template(node: ast.expr) -> str:
    """Return the text of an expression, with what is computed as ‹expression›.

    >>> template(ast.parse('f"step.micro_batches={n}; expected " + ("1" if one else "more")', mode="eval").body)
    'step.micro_batches=‹n›; expected ‹1 | more›'
    """
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(value) for value in values)
        case ast.FormattedValue(value=value):
            return _placeholder(value)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
    return _placeholder(node)


def _placeholder(node: ast.expr) -> str:
    if isinstance(node, ast.IfExp):
        branches = [template(branch).strip("‹›") for branch in (node.body, node.orelse)]
        return f"‹{' | '.join(branch or 'nothing' for branch in branches)}›"
    text = ast.unparse(node)
    return f"‹{text if len(text) <= MAX_EXPRESSION else '…'}›"
