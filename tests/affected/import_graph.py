"""The import graph of the sources and the tests, read from their text: nothing is imported.

A name that a package's `__init__` re-exports leads to the module that defines it. Without that, each test that imports
anything of `panax.core` would depend on every module of `panax.core`.
"""

import ast
import dataclasses
import gc
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

SOURCE_ROOTS = ("src", "recipes")
"""Folders with packages that are imported by their full names."""

TESTS = "tests"

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
_KINDS = frozenset({ast.Import, ast.ImportFrom, ast.Name, ast.Attribute, ast.Constant, ast.Dict})


@dataclasses.dataclass
class Module:
    """A parsed file.

    Attributes:
        path: Relative to the root of the repository.
        package: Its dotted package, against which relative imports are resolved; empty in most tests.
        tree: None if the file does not parse or does not exist any more.
        exports: Re-exported name to the names (module, attribute) it is imported from; of an `__init__` only.
        strings: The string constants of one line.
        nodes: The nodes that determine the dependencies of a file, by type.
    """

    path: str
    package: str
    tree: ast.Module | None
    exports: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    strings: frozenset[str] = frozenset()
    nodes: dict[type, list[Any]] = dataclasses.field(default_factory=dict)

    def of_type(self, kind: type) -> list[Any]:
        """Nodes of the whole file of this type."""
        return self.nodes.get(kind, [])


class ImportGraph:
    """Files and the files that each depends on.

    Attributes:
        modules: Path to the parsed file.
        imports: Path to the paths of what it imports or names.
        broken: Path to the error of each file that does not parse.
    """

    def __init__(self, root: Path, deleted: Iterable[str] = ()):
        """Read every Python file below `root`.

        Args:
            deleted: Paths of files that no longer exist; imports of them are still resolved.
        """
        self.root = root
        self.modules: dict[str, Module] = {}
        self.broken: dict[str, str] = {}
        self._by_name: dict[str, str] = {}
        files = [
            path.relative_to(root).as_posix()
            for top in (*SOURCE_ROOTS, TESTS)
            for path in sorted((root / top).rglob("*.py"))
        ]
        # Nothing here is garbage, and looking for it takes half of the time.
        collects = gc.isenabled()
        gc.disable()
        try:
            for path in [*files, *(path for path in deleted if path.endswith(".py"))]:
                self._add(path)
        finally:
            if collects:
                gc.enable()
        for module in self.modules.values():
            if _is_init(module.path) and module.tree is not None:
                module.exports = dict(self._exports_of(module))
        self._recipes = {
            node.name: path
            for path, module in self.modules.items()
            if path.startswith("recipes/") and module.tree is not None
            for node in module.tree.body
            if isinstance(node, ast.FunctionDef)
        }
        self.imports = {path: self._imports_of(module) - {path} for path, module in self.modules.items()}

    def importers(self) -> dict[str, set[str]]:
        """Path to the files that import it."""
        reverse: dict[str, set[str]] = {path: set() for path in self.modules}
        for path, targets in self.imports.items():
            for target in targets:
                reverse[target].add(path)
        return reverse

    def _add(self, path: str) -> None:
        parts = path.removesuffix(".py").split("/")
        dotted, package = "", ""
        if parts[0] in SOURCE_ROOTS:
            names = parts[1:-1] if parts[-1] == "__init__" else parts[1:]
            dotted, package = ".".join(names), ".".join(parts[1:-1])
            self._by_name[dotted] = path
        elif (self.root / path).parent.joinpath("__init__.py").exists():
            package = ".".join(parts[1:-1])
        tree = None
        try:
            tree = ast.parse((self.root / path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            pass
        except (SyntaxError, UnicodeDecodeError, ValueError) as error:
            self.broken[path] = str(error)
        nodes: dict[type, list[Any]] = {}
        for node in ast.walk(tree) if tree else ():
            if type(node) in _KINDS:
                nodes.setdefault(type(node), []).append(node)
        constants = (node.value for node in nodes.get(ast.Constant, ()))
        strings = frozenset(text for text in constants if isinstance(text, str) and "\n" not in text)
        self.modules[path] = Module(path, package, tree, strings=strings, nodes=nodes)

    def _exports_of(self, module: Module) -> Iterator[tuple[str, tuple[str, str]]]:
        """What an `__init__` re-exports, by `from ... import` or by a table of lazily imported names."""
        for node in module.of_type(ast.ImportFrom):
            source = _absolute(node, module.package)
            for alias in node.names:
                yield alias.asname or alias.name, (source, alias.name)
        for node in module.of_type(ast.Dict):
            for key, names in zip(node.keys, node.values):
                source = f"{module.package}.{key.value}" if isinstance(key, ast.Constant) else ""
                if source in self._by_name and isinstance(names, ast.Tuple | ast.List):
                    for name in names.elts:
                        if isinstance(name, ast.Constant) and isinstance(name.value, str):
                            yield name.value, (source, name.value)

    def _find(self, dotted: str, importer: str) -> str | None:
        """The file of a module's name, as `importer` would find it."""
        if dotted in self._by_name:
            return self._by_name[dotted]
        if not importer.startswith(f"{TESTS}/"):
            return None
        relative = dotted.replace(".", "/")
        for folder in dict.fromkeys((importer.rpartition("/")[0], TESTS)):
            for candidate in (f"{folder}/{relative}.py", f"{folder}/{relative}/__init__.py"):
                if candidate in self.modules:
                    return candidate
        return None

    def _resolve(self, source: str, name: str, importer: str, depth: int = 0) -> str | None:
        """The file that defines attribute `name` of module `source`: a sub-module, or the target of a re-export."""
        if modules := self._find(f"{source}.{name}", importer):
            return modules
        path = self._find(source, importer)
        if path is None:
            return None
        exports = self.modules[path].exports
        if name in exports and depth < 8 and exports[name] != (source, name):
            return self._resolve(*exports[name], importer, depth + 1) or path
        return path

    def _imports_of(self, module: Module) -> set[str]:
        if module.tree is None:
            return set()
        modules: set[str] = set()
        bound: dict[str, str] = {}
        used = {node.id for node in module.of_type(ast.Name)}
        for node in module.of_type(ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                bound[alias.asname or first] = alias.name if alias.asname else first
                modules.add(self._find(alias.name, module.path) or "")
        for node in module.of_type(ast.ImportFrom):
            source = _absolute(node, module.package)
            for alias in node.names:
                # A name that an `__init__` only passes on makes no edge: importers of it have their own.
                if _is_init(module.path) and (alias.asname or alias.name) not in used:
                    continue
                modules |= {self._find(source, module.path) or "", self._resolve(source, alias.name, module.path) or ""}
                if self._find(f"{source}.{alias.name}", module.path):
                    bound[alias.asname or alias.name] = f"{source}.{alias.name}"
        modules |= self._attributes(module, bound)
        modules |= self._named(module)
        modules.discard("")
        return modules

    def _attributes(self, module: Module, bound: Mapping[str, str]) -> set[str]:
        """Files behind expressions such as `panax.core.errors.suggest_name`, for the modules bound to names."""
        modules: set[str] = set()
        for node in module.of_type(ast.Attribute):
            names = _chain(node)
            if not names or names[0] not in bound:
                continue
            source = bound[names[0]]
            for name in names[1:]:
                modules.add(self._resolve(source, name, module.path) or "")
                if not self._find(f"{source}.{name}", module.path):
                    break
                source = f"{source}.{name}"
        return modules

    def _named(self, module: Module) -> set[str]:
        """Files that string constants name: dotted names, scripts, sub-modules that are imported by name, recipes."""
        modules: set[str] = set()
        folder = module.path.rpartition("/")[0]
        imports_by_name = any(node.attr == "import_module" for node in module.of_type(ast.Attribute)) or any(
            node.id == "import_module" for node in module.of_type(ast.Name)
        )
        is_test = module.path.startswith(f"{TESTS}/")
        if is_test and {"-m", "panax"} <= module.strings:
            modules.add(self._by_name.get("panax.__main__", ""))
        for text in module.strings:
            if text.endswith(".py"):
                for candidate in (f"{folder}/{text}", f"{TESTS}/{text}", text):
                    if candidate in self.modules:
                        modules.add(candidate)
                        break
            elif _DOTTED.fullmatch(text):
                source, _, name = text.rpartition(".")
                while source and not self._find(source, module.path):
                    source, _, name = source.rpartition(".")
                if source:
                    modules.add(self._resolve(source, name, module.path) or "")
            elif is_test and text in self._recipes:
                modules.add(self._recipes[text])
            elif imports_by_name and text.isidentifier() and not _is_init(module.path):
                modules.add(self._by_name.get(f"{module.package}.{text}", ""))
        return modules


def _is_init(path: str) -> bool:
    return path.endswith("/__init__.py")


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The module that a `from` import names, with relative levels resolved."""
    if not node.level:
        return node.module or ""
    names = package.split(".")
    base = names[: len(names) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _chain(node: ast.Attribute) -> list[str] | None:
    """The names of `a.b.c`, or None if the expression does not begin with a name."""
    names: list[str] = []
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    return [inner.id, *reversed(names)] if isinstance(inner, ast.Name) else None
