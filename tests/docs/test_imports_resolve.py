"""What benchmarks, examples and tests import from Panax exists: most of them run rarely, so a renamed module is missed."""

import ast
import importlib
import re
import subprocess
import types
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


_IMPORTED = re.compile(
    r"^[ \t]*(?:from (panax[\w.]*) import (\w+(?:, \w+)*)(?: as (\w+))?|import (panax[\w.]+) as (\w+))$", re.MULTILINE
)
_ASSIGNED = re.compile(r"^[ \t]*(\w+)\.(\w+)(?:\.\w+)* = ", re.MULTILINE)


def absent_targets(text: str) -> Iterator[str]:
    """Yields the assignments to attributes that a module of Panax lacks, also those in scripts that tests hold as text: after a
    renaming they would change nothing, and the test would pass for another reason, or wait."""
    modules: dict[str, types.ModuleType] = {}
    for package, names, alias, module, whole_alias in _IMPORTED.findall(text):
        for name in names.split(", ") if names else [""]:
            try:
                imported = (
                    getattr(importlib.import_module(package or module), name)
                    if name
                    else importlib.import_module(module)
                )
            except (AttributeError, ModuleNotFoundError):
                continue
            if isinstance(imported, types.ModuleType):
                modules[alias or name or whole_alias] = imported
    for name, attribute in _ASSIGNED.findall(text):
        if name in modules and not hasattr(modules[name], attribute):
            yield f"{name}.{attribute}"


def test_every_import_of_panax_resolves() -> None:
    missing = {}
    for path in python_files():
        text = path.read_text(encoding="utf-8")
        if lines := [*unresolved(ast.parse(text)), *absent_targets(text)]:
            missing[str(path.relative_to(ROOT))] = lines
    assert not missing


@pytest.mark.parametrize(
    "source", ["import panax.absent", "from panax.absent import x", "def f():\n    from panax.core import absent"]
)
def test_a_missing_name_is_found(source: str) -> None:
    assert list(unresolved(ast.parse(source)))


def test_an_attribute_that_a_renaming_left_behind_is_found() -> None:
    script = '''PROGRAM = """
from panax.job import cpu_scheduling as scheduling
import panax.run.recovery.interrupt as interrupt
scheduling.{} = 0.02
interrupt.RESPONSE_SECONDS = 0.5
"""'''
    assert list(absent_targets(script.format("SECONDS"))) == ["scheduling.SECONDS"]
    assert list(absent_targets(script.format("CHECK_SECONDS"))) == []


def test_names_and_submodules_resolve() -> None:
    assert not list(unresolved(ast.parse("import panax.core\nfrom panax.core import errors\nfrom panax import Task\n")))
