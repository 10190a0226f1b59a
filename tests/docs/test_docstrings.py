"""Every example in every docstring of the package, under the tests' strict dtype and rank promotion and shape checks."""

import ast
import doctest
import importlib
import pkgutil
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import panax
import panax_compare
from panax.core import serializable
from panax.kernels import cost

MODULES = [
    name
    for package in (panax, panax_compare)
    for name in (
        package.__name__,
        *(module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")),
    )
]


PROMPT = ">>>"


def source_of(name: str) -> tuple[types.ModuleType, str]:
    """A module, and its text."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    return module, Path(module.__file__).read_text(encoding="utf-8")


def examples(name: str) -> Iterator[doctest.DocTest]:
    """The examples of a module, read from its source: `doctest`'s own search passes over decorated functions."""
    module, source = source_of(name)
    # Most modules have none, and parsing them all takes ten seconds.
    for node in ast.walk(ast.parse(source)) if PROMPT in source else ():
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text and PROMPT in text:
            where = f"{name}.{getattr(node, 'name', '')}".rstrip(".")
            line = node.body[0].lineno - 1
            yield doctest.DocTestParser().get_doctest(text, dict(vars(module)), where, module.__file__ or name, line)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, monkeypatch):
    # What an example registers is gone after it: other tests of this process see Panax's own alone.
    for module, registered in ((serializable, "_classes"), (cost, "_COSTS")):
        monkeypatch.setattr(module, registered, dict(getattr(module, registered)))
    for example in examples(name):
        report: list[str] = []
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append)
        assert result.attempted > 0 and result.failed == 0, "".join(report)


def test_there_are_examples():
    # Without importing: some modules import a framework.
    folders = [Path(package.__path__[0]) for package in (panax, panax_compare)]
    assert sum(PROMPT in path.read_text("utf-8") for folder in folders for path in folder.rglob("*.py")) >= 100
    assert len(list(examples("panax.optim.schedule"))) >= 1
