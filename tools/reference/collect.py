"""Exported names of all packages, read from the syntax trees: nothing is imported, optional libraries included."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

TOP = "panax"
"""The package with the documented names."""


class Export(NamedTuple):
    """A name that a package exports.

    Attributes:
        package: Dotted path of the package.
        module: Dotted path of the module that defines the name.
        node: Its definition; None for a module or a name that is bound in another way.
        doc: Its docstring, or the string below an assignment.
        inherited: For a class: the methods of its bases in Panax that no package exports.
    """

    package: str
    name: str
    module: str
    node: ast.stmt | None
    doc: str
    inherited: tuple[ast.FunctionDef, ...] = ()


class Definition(NamedTuple):
    """The statement that defines a name, and the module that has it."""

    module: str
    node: ast.stmt | None
    doc: str


def collect(sources: Path) -> dict[str, list[Export]]:
    """Return the exports of every package below `sources` that has an `__all__`, by the package's dotted path."""
    found: dict[str, list[Export]] = {}
    for path in sorted((sources / TOP).rglob("__init__.py")):
        package = ".".join(path.parent.relative_to(sources).parts)
        names = exported_names(_tree(path))
        if names:
            found[package] = [Export(package, name, *find_definition(sources, package, name)) for name in names]
    exported = {(each.module, each.name) for exports in found.values() for each in exports}
    return {
        package: [
            each._replace(inherited=tuple(_inherited(sources, each.module, each.node, exported))) for each in exports
        ]
        for package, exports in found.items()
    }


def _inherited(
    sources: Path, module: str, node: ast.stmt | None, exported: set[tuple[str, str]]
) -> Iterator[ast.FunctionDef]:
    """Yield the methods that a class has from bases without an entry of their own."""
    for base in node.bases if isinstance(node, ast.ClassDef) else ():
        if not isinstance(base, ast.Name):
            continue
        definition = find_definition(sources, module, base.id)
        if isinstance(definition.node, ast.ClassDef) and (definition.module, base.id) not in exported:
            yield from (each for each in definition.node.body if isinstance(each, ast.FunctionDef))
            yield from _inherited(sources, definition.module, definition.node, exported)


def exported_names(tree: ast.Module) -> list[str]:
    """Return the names in a package's `__all__`, without those that begin with an underscore."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(each, ast.Name) and each.id == "__all__" for each in node.targets
        ):
            names = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            return sorted(name for name in names if isinstance(name, str) and not name.startswith("_"))
    return []


def find_definition(sources: Path, module: str, name: str) -> Definition:
    """Find the statement that defines a name, through any number of re-exports."""
    path = _path(sources, module)
    if path is None:
        return Definition(module, None, "")
    tree = _tree(path)
    for here, following in zip(tree.body, [*tree.body[1:], None]):
        if isinstance(here, ast.FunctionDef | ast.ClassDef) and here.name == name:
            return Definition(module, here, ast.get_docstring(here) or "")
        if name in _assigned(here):
            text = following.value if isinstance(following, ast.Expr) else None
            doc = text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""
            return Definition(module, here, doc)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in _imports(tree):
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                parent = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
                source = ".".join(filter(None, (parent, node.module)))
                if _path(sources, f"{source}.{alias.name}") is not None:
                    return Definition(f"{source}.{alias.name}", None, _module_doc(sources, f"{source}.{alias.name}"))
                return find_definition(sources, source, alias.name)
    whole = f"{module}.{name}"
    return (
        Definition(whole, None, _module_doc(sources, whole)) if _path(sources, whole) else Definition(module, None, "")
    )


def _imports(tree: ast.Module) -> Iterator[ast.ImportFrom]:
    """Yield the imports of a module's top, those for type checkers included."""
    for node in tree.body:
        for each in node.body if isinstance(node, ast.If) else [node]:
            if isinstance(each, ast.ImportFrom):
                yield each


def _assigned(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [each.id for each in node.targets if isinstance(each, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _module_doc(sources: Path, module: str) -> str:
    path = _path(sources, module)
    return (ast.get_docstring(_tree(path)) or "") if path else ""


def _path(sources: Path, module: str) -> Path | None:
    """Return the file of a module or package; None if it is not one of ours."""
    base = sources.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))
