"""Imports of moved modules in a Python file: the statements, the names that they bind, and attributes that lead to modules."""

import ast
import re
from collections.abc import Mapping
from typing import NamedTuple


class Edit(NamedTuple):
    """New text for a range of characters."""

    start: int
    end: int
    text: str


class ImportRewriter:
    """Rewrites one file.

    Attributes:
        remarks: Attributes that a person must rewrite, each with its line.
    """

    def __init__(
        self, text: str, module: str, is_package: bool, table: Mapping[str, str], functions: frozenset[str]
    ) -> None:
        """Read a file.

        Args:
            module: Dotted path of the file as it was, "" outside of the sources.
            table: Old to new path of every module of the sources.
            functions: Paths that a package exports as something else than the module of that name.
        """
        self.text, self.table, self.functions = text, table, functions
        self.tree = ast.parse(text)
        self.lines = line_starts(text)
        self.package = module if is_package else module.rpartition(".")[0]
        moved = table.get(module, module)
        self.new_package = moved if is_package else moved.rpartition(".")[0]
        self.tops = {name.partition(".")[0] for name in table}
        self.names = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        self.names |= {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}
        self.edits: set[Edit] = set()
        self.bound: dict[str, str] = {}
        self.renamed: dict[str, str] = {}
        self.remarks: list[str] = []

    def rewrite(self) -> str:
        """Return the file's new text."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom):
                self._import_from(node)
        self._attributes()
        self._names()
        return apply(self.text, self.edits)

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            first = alias.name.partition(".")[0]
            self.bound[alias.asname or first] = alias.name if alias.asname else first
            if (new := self.table.get(alias.name, alias.name)) != alias.name:
                self._edit(alias, _spelled(new, alias.asname))

    def _import_from(self, node: ast.ImportFrom) -> None:
        base = imported_from(node, self.package)
        if base is None or base.partition(".")[0] not in self.tops:
            return
        groups: dict[str, list[str]] = {}
        for alias in node.names:
            holder, spelled = self._alias(base, alias)
            groups.setdefault(holder, []).append(spelled)
        written = {written_path(holder, self.new_package, bool(node.level)): names for holder, names in groups.items()}
        start, end = span(node, self.lines)
        if list(written.values()) == [[_spelled(alias.name, alias.asname) for alias in node.names]]:
            # Only the module is another one: what follows it stays, with its comments and line breaks.
            match = re.match(r"from\s+([.\w]+)", self.text[start:end])
            (path,) = written
            if match and match[1] != path:
                self.edits.add(Edit(start + match.start(1), start + match.end(1), path))
        else:
            statements = (f"from {path} import {', '.join(names)}" for path, names in written.items())
            self._edit(node, ("\n" + " " * node.col_offset).join(statements))

    def _alias(self, base: str, alias: ast.alias) -> tuple[str, str]:
        """Return the module that an imported name is imported from now, and how."""
        full = f"{base}.{alias.name}"
        if full not in self.table or full in self.functions:
            return self.table.get(base, base), _spelled(alias.name, alias.asname)
        holder, _, name = self.table[full].rpartition(".")
        self.bound[alias.asname or alias.name] = full
        asname = name if alias.asname == alias.name else alias.asname
        if name != alias.name and asname is None:
            if name in self.names:
                asname = alias.name
            else:
                self.renamed[alias.name] = name
        return holder, _spelled(name, asname)

    def _attributes(self) -> None:
        inside: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and id(node) not in inside and (chain := _chain(node)):
                inside |= {id(part) for part in ast.walk(node)}
                self._attribute(chain)

    def _attribute(self, chain: list[ast.expr]) -> None:
        """Rewrite `a.b.c`, of which `a` may be bound to a package and `b` its module."""
        names = [node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") for node in chain]
        if (first := names[0]) not in self.bound:
            return
        for count in range(len(chain), 1, -1):
            full = ".".join((self.bound[first], *names[1:count]))
            if full in self.functions and count == len(chain):
                return
            if full in self.table:
                begin, new = self.table.get(self.bound[first], self.bound[first]), self.table[full]
                if not new.startswith(begin + "."):
                    self.remarks.append(f"{chain[0].lineno}: {'.'.join(names)} leads to {new}")
                elif new != full or first in self.renamed:
                    self._edit(chain[count - 1], self.renamed.get(first, first) + new[len(begin) :])
                return

    def _names(self) -> None:
        spans = [(edit.start, edit.end) for edit in self.edits]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and node.id in self.renamed:
                start, end = span(node, self.lines)
                if not any(first <= start and end <= last for first, last in spans):
                    self.edits.add(Edit(start, end, self.renamed[node.id]))

    def _edit(self, node: ast.stmt | ast.expr | ast.alias, text: str) -> None:
        self.edits.add(Edit(*span(node, self.lines), text))


def imported_from(node: ast.ImportFrom, package: str) -> str | None:
    """Return the dotted path that a `from ... import` of a module in `package` reads from."""
    if not node.level:
        return node.module
    if not package:
        return None
    parts = package.split(".")
    return ".".join((*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])))


def written_path(target: str, package: str, relative: bool) -> str:
    """Return how a module of `package` names another one.

    >>> written_path("p.a.b", "p.a", True), written_path("p.c", "p.a", True), written_path("p", "p.a", True)
    ('.b', '..c', '..')
    """
    if not relative:
        return target
    here, there = package.split("."), target.split(".")
    common = 0
    while common < min(len(here), len(there)) and here[common] == there[common]:
        common += 1
    return "." * (len(here) - common + 1) + ".".join(there[common:])


def line_starts(text: str) -> list[tuple[int, str]]:
    """Return each line with the character that it starts at."""
    lines, start = [], 0
    for line in text.split("\n"):
        lines.append((start, line))
        start += len(line) + 1
    return lines


def span(node: ast.stmt | ast.expr | ast.alias, lines: list[tuple[int, str]]) -> tuple[int, int]:
    """Return the characters that a node spans; a syntax tree's own columns count bytes."""
    start, first = lines[node.lineno - 1]
    end, last = lines[(node.end_lineno or node.lineno) - 1]
    return (
        start + len(first.encode()[: node.col_offset].decode()),
        end + len(last.encode()[: node.end_col_offset or 0].decode()),
    )


def apply(text: str, edits: set[Edit]) -> str:
    """Return the text after edits that don't overlap."""
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _spelled(name: str, asname: str | None) -> str:
    return name if asname is None else f"{name} as {asname}"


def _chain(node: ast.expr) -> list[ast.expr] | None:
    """Return the expressions `a`, `a.b` and `a.b.c` of `a.b.c`; None if it begins with anything but a name."""
    nodes = [node]
    while isinstance(node, ast.Attribute):
        node = node.value
        nodes.append(node)
    return nodes[::-1] if isinstance(node, ast.Name) else None
