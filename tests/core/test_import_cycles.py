"""No module imports itself through others, also not by an import in a function; imports for types alone are not executed.

An import in a function hides a cycle from Python, not from the reader: neither module is understood, tested or moved without
the other. Import-linter holds the order of the rooms, imports in functions included; this holds the order within a room.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
PACKAGES = ("panax", "panax_compare")


def modules(root: Path = SOURCE, packages: Iterable[str] = PACKAGES) -> dict[str, Path]:
    found = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(name: str, path: Path, known: Mapping[str, Path]) -> set[str]:
    """The modules that a module imports anywhere, except for types alone."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in executed(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            base = base if node.level else node.module or ""
            found |= {full if (full := f"{base}.{each.name}") in known else base for each in node.names}
    return {each for each in found if each in known and each != name}


def executed(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements: no expression holds an import, and most nodes are expressions."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            types_alone = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case) and not types_alone:
                yield child
                waiting.append(child)


def cycles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules that reach each other (strongly connected components of more than one)."""
    reached = {name: _reached(name, arrows) for name in arrows}
    groups = {
        frozenset(other for other in reached[name] if name in reached[other])
        for name in arrows
        if name in reached[name]
    }
    return sorted(map(sorted, groups))


def _reached(name: str, arrows: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for each in arrows[waiting.pop()]:
            if each not in found:
                found.add(each)
                waiting.append(each)
    return found


def test_no_module_imports_itself_through_others():
    known = modules()
    assert cycles({name: imports_of(name, path, known) for name, path in known.items()}) == []


def test_a_planted_cycle_is_found(tmp_path):
    package = tmp_path / "pack"
    (package / "inner").mkdir(parents=True)
    for file, text in {
        "__init__.py": "",
        "a.py": "from .inner.b import f\n",
        "inner/__init__.py": "",
        "inner/b.py": "def f():\n    from .. import c\n",
        "c.py": "import pack.a\n",
        "d.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .e import f\n",
        "e.py": "from . import d\n",
    }.items():
        (package / file).write_text(text)
    known = modules(tmp_path, ["pack"])
    assert cycles({name: imports_of(name, path, known) for name, path in known.items()}) == [
        ["pack.a", "pack.c", "pack.inner.b"]
    ]
