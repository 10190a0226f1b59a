"""Bring a script outside the project up to date with `docs/renames.csv`."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from panax.core.former_names import FIELDS

from .table import TEXT_KINDS, Rename, forward


class _Change(NamedTuple):
    line: int
    start: int
    end: int
    text: str


def rewrite_script(text: str, renames: list[Rename]) -> str:
    """Return a script with the new names: imports, the names that they bind, attributes of modules, settings given to classes
    of Panax, and flags, metrics and files wherever they stand.

    Methods and fields of objects are not renamed otherwise, since a script's text does not tell their classes: such a line
    fails when it runs, and the table has its new name.

    >>> table = [Rename("name", "panax.optim.on_shards.Kept", "panax.optim.on_shards.StateSpec")]
    >>> rewrite_script("from panax.optim.on_shards import Kept\\n\\nKept.like(x)\\n", table)
    'from panax.optim.on_shards import StateSpec\\n\\nStateSpec.like(x)\\n'
    >>> rewrite_script("from panax.optim import AdamW\\n\\nAdamW(rates={})\\n", table)
    'from panax.optim import AdamW\\n\\nAdamW(lr_multipliers={})\\n'
    """
    tree = ast.parse(text)
    bound: dict[str, str] = {}
    changes: list[_Change] = []
    by_package = _by_package(renames)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            _import(node, renames, by_package, bound, changes)
    classes = {alias.asname or alias.name: bound.get(alias.name, alias.name) for alias in _imported(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            changes += _keywords(node, classes)
        if isinstance(node, ast.Name) and node.id in bound:
            changes.append(_Change(node.lineno, node.col_offset, node.end_col_offset or 0, bound[node.id]))
    lines = text.split("\n")
    for change in sorted(set(changes), reverse=True):
        line = lines[change.line - 1].encode()
        lines[change.line - 1] = (line[: change.start] + change.text.encode() + line[change.end :]).decode()
    dotted = re.compile(r"\bpanax(?:_compare)?(?:\.\w+)+")
    return rewrite_settings(dotted.sub(lambda match: forward(match.group(), renames), "\n".join(lines)), renames)


def rewrite_settings(text: str, renames: list[Rename]) -> str:
    """Return a text, such as a shell script, with the new flags, metrics and files.

    >>> rewrite_settings("panax train x --rewind.after 3", [Rename("flag", "--rewind.after", "--rollback.after")])
    'panax train x --rollback.after 3'
    """
    for rename in renames:
        if rename.kind in TEXT_KINDS:
            # The command line takes dashes and underscores alike.
            old = re.escape(rename.old).replace(r"\-", "[-_]") if rename.kind == "flag" else re.escape(rename.old)
            text = re.sub(rf"(?<![\w./-]){old}(?![\w./-])", rename.new, text)
    return text


def _imported(tree: ast.Module) -> Iterator[ast.alias]:
    """Names that a script takes from Panax."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "panax":
            yield from node.names


def _keywords(call: ast.Call, classes: dict[str, str]) -> Iterator[_Change]:
    """Renamed settings in a call of a class of Panax, imported or reached through a module."""
    function = call.func
    name = classes.get(function.id, "") if isinstance(function, ast.Name) else getattr(function, "attr", "")
    for keyword in call.keywords:
        new = FIELDS.get(name, {}).get(keyword.arg or "")
        if new and keyword.arg:
            end = keyword.col_offset + len(keyword.arg.encode())
            yield _Change(keyword.lineno, keyword.col_offset, end, new)


def _import(
    node: ast.ImportFrom,
    renames: list[Rename],
    by_package: dict[tuple[str, str], str],
    bound: dict[str, str],
    changes: list[_Change],
) -> None:
    """Rename what `from module import a, b` takes; the module itself is renamed as a dotted path."""
    for alias in node.names:
        path = f"{node.module}.{alias.name}"
        new = forward(path, renames)
        name = new.rpartition(".")[2]
        if new == path:
            name = by_package.get((node.module or "", alias.name), alias.name)
        if name != alias.name:
            changes.append(_Change(alias.lineno, alias.col_offset, alias.col_offset + len(alias.name.encode()), name))
            if alias.asname is None:
                bound[alias.name] = name


def _by_package(renames: list[Rename]) -> dict[tuple[str, str], str]:
    """New names by each package that may export the old one, where only one of its modules had it."""
    names: dict[tuple[str, str], set[str]] = {}
    for rename in renames:
        if rename.kind == "name":
            parts = rename.old.split(".")
            for count in range(1, len(parts) - 1):
                names.setdefault((".".join(parts[:count]), parts[-1]), set()).add(rename.new_name)
    return {key: next(iter(new)) for key, new in names.items() if len(new) == 1}
