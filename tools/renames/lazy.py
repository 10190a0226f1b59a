"""Names in the tables by which packages import on first use: `{"submodule": ("name", ...)}`."""

import ast
from collections.abc import Mapping

from .imports import Edit, apply, line_starts, span
from .table import Rename


def rewrite_lazy_tables(text: str, package: str, renames: list[Rename]) -> str:
    """Put new names into the tables of a package's `__init__`.

    >>> rewrite_lazy_tables('lazily(__name__, {"a": ("X", "y")})', "p", [Rename("name", "p.a.X", "p.a.Z")])
    'lazily(__name__, {"a": ("Z", "y")})'
    """
    names = {rename.old: rename.new_name for rename in renames if rename.kind == "name"}
    lines = line_starts(text)
    edits: set[Edit] = set()
    for table in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Dict)):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                for item in value.elts:
                    if isinstance(item, ast.Constant) and (new := names.get(f"{package}.{key.value}.{item.value}")):
                        edits.add(Edit(*span(item, lines), f'"{new}"'))
    return apply(text, edits)


def rewrite_lazy_keys(text: str, package: str, table: Mapping[str, str]) -> str:
    """Put the new paths of modules into the keys of a package's tables.

    >>> rewrite_lazy_keys('lazily(__name__, {"a": ("X",)})', "p", {"p.a": "p.inner.a"})
    'lazily(__name__, {"inner.a": ("X",)})'
    """
    new_package = table.get(package, package)
    lines = line_starts(text)
    edits: set[Edit] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Dict) or not all(isinstance(value, ast.Tuple) for value in node.values):
            continue
        for key in node.keys:
            if isinstance(key, ast.Constant):
                new = table.get(f"{package}.{key.value}", "")
                if new.startswith(f"{new_package}."):
                    edits.add(Edit(*span(key, lines), f'"{new.removeprefix(f"{new_package}.")}"'))
    return apply(text, edits)
