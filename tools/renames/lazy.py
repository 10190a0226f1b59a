"""Names in the tables by which packages import on first use: `{"submodule": ("name", ...)}`."""

import ast

from .table import Rename


def rewrite_lazy_tables(text: str, package: str, renames: list[Rename]) -> str:
    """Put new names into the tables of a package's `__init__`.

    >>> rewrite_lazy_tables('lazily(__name__, {"a": ("X", "y")})', "p", [Rename("name", "p.a.X", "p.a.Z")])
    'lazily(__name__, {"a": ("Z", "y")})'
    """
    names = {rename.old: rename.new_name for rename in renames if rename.kind == "name"}
    lines = text.split("\n")
    strings: list[tuple[ast.Constant, str]] = []
    for table in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Dict)):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                held = (item for item in value.elts if isinstance(item, ast.Constant))
                strings += [(item, new) for item in held if (new := names.get(f"{package}.{key.value}.{item.value}"))]
    for item, new in sorted(strings, key=lambda pair: (pair[0].lineno, pair[0].col_offset), reverse=True):
        line = lines[item.lineno - 1].encode()
        lines[item.lineno - 1] = (line[: item.col_offset] + f'"{new}"'.encode() + line[item.end_col_offset :]).decode()
    return "\n".join(lines)
