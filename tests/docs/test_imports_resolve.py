"""What benchmarks, examples and tests import from Panax exists: most of them run rarely, so a renamed module is missed."""

import ast
import importlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python_files() -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    for name in listed.stdout.splitlines():
        # The type checker reads these two.
        if not name.startswith(("src/", "recipes/")):
            yield ROOT / name


def unresolved(tree: ast.AST) -> Iterator[str]:
    """Yields the imports of Panax in `tree`, at any depth, that name no module and no attribute of one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, attribute in names:
            if module.split(".")[0] in ("panax", "panax_compare", "panax_recipes") and not resolves(module, attribute):
                yield f"line {node.lineno}: {module}{f'.{attribute}' if attribute else ''}"


def resolves(module: str, attribute: str | None) -> bool:
    try:
        imported = importlib.import_module(module)
        if attribute is None or attribute == "*" or hasattr(imported, attribute):
            return True
        importlib.import_module(f"{module}.{attribute}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("panax"):
            raise
        return False
    return True


def test_every_import_of_panax_resolves() -> None:
    missing = {}
    for path in python_files():
        if lines := list(unresolved(ast.parse(path.read_text()))):
            missing[str(path.relative_to(ROOT))] = lines
    assert not missing


@pytest.mark.parametrize(
    "source", ["import panax.absent", "from panax.absent import x", "def f():\n    from panax.core import absent"]
)
def test_a_missing_name_is_found(source: str) -> None:
    assert list(unresolved(ast.parse(source)))


def test_names_and_submodules_resolve() -> None:
    assert not list(unresolved(ast.parse("import panax.core\nfrom panax.core import errors\nfrom panax import Task\n")))
