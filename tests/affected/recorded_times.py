"""Time of each test: the recorded seconds, if any, otherwise an estimate."""

import ast
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

DEFAULT_SECONDS = 3.0
"""Seconds of a test function, if no durations are recorded."""

SHORT_SECONDS = 0.5
"""Seconds of a test function that is not among the recorded ones: short cases are not recorded."""

LONG_SECONDS = 30.0
"""Seconds of a test function from which its recorded cases are chosen one by one."""

OTHER_TIERS = frozenset({"slow", "full", "gpu", "tpu"})
"""Marks of tests that are not in the default tier."""


class Case(NamedTuple):
    """A test function, or one parametrized case of it.

    Attributes:
        name: Node id relative to `tests/`.
        seconds: Wall seconds, recorded or estimated.
    """

    name: str
    seconds: float


class RecordedTimes:
    """Durations of tests by name.

    Attributes:
        seconds: Node id relative to `tests/`, to wall seconds.
        left_out: Node ids of cases that are in slower tiers, and paths of files that are wholly so.
    """

    def __init__(self, seconds: Mapping[str, float] | None = None, left_out: frozenset[str] = frozenset()):
        self.seconds = {name: value for name, value in (seconds or {}).items() if name not in left_out}
        self.left_out = left_out
        self._of_function: dict[str, list[Case]] = {}
        for name, value in self.seconds.items():
            self._of_function.setdefault(name.partition("[")[0], []).append(Case(name, value))
        self.default = SHORT_SECONDS if self.seconds else DEFAULT_SECONDS

    @classmethod
    def read(cls, root: Path, *, all_tiers: bool = False) -> "RecordedTimes":
        """Read `tests/durations.json` and `tests/tiers.toml`, if they exist.

        Raises:
            ValueError: A file is not of the expected form.
        """
        path = root / "tests/durations.json"
        left_out = frozenset() if all_tiers else slower_cases(root)
        if not path.exists():
            return cls(None, left_out)
        try:
            return cls({name: float(row[0]) for name, row in json.loads(path.read_text()).items()}, left_out)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(
                f'{path} should map "path::test[param]" to [wall seconds, CPU seconds]; {error}. '
                "Write it again with `python tests/timings --record`"
            ) from error

    def cases(self, name: str) -> list[Case]:
        """The cases of a test function that are chosen one by one; the function itself if it is short."""
        if {name, name.partition("::")[0]} & self.left_out:
            return []
        recorded = self._of_function.get(name, [])
        total = sum(case.seconds for case in recorded)
        return recorded if total > LONG_SECONDS else [Case(name, total or self.default)]


def slower_cases(root: Path) -> frozenset[str]:
    """The cases that `tests/tiers.toml` gives to slower tiers, as node ids; the path of a file for all of its cases.

    Raises:
        ValueError: The file is not of the expected form.
    """
    path = root / "tests/tiers.toml"
    if not path.exists():
        return frozenset()
    try:
        tiers = tomllib.loads(path.read_text(encoding="utf-8"))
        listed = [(file, case) for files in tiers.values() for file, cases in files.items() for case in cases]
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} should have tables of files with lists of their cases; {error}") from error
    return frozenset(file if case == "*" else f"{file}::{case}" for file, case in listed)


def test_functions(path: str, tree: ast.Module, *, all_tiers: bool = False) -> list[str]:
    """The test functions of a file as node ids relative to `tests/`; those of the default tier, or all."""
    left_out = frozenset({"gpu", "tpu"}) if all_tiers else OTHER_TIERS

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets
            ):
                if left_out & set(_marks(node.value)):
                    return
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                if any(left_out & set(_marks(mark)) for mark in node.decorator_list):
                    continue
                if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                    yield from walk(node.body, f"{prefix}::{node.name}")
                elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                    yield f"{prefix}::{node.name}"

    # A file's `pytestmark` may follow its tests.
    marks = sorted(tree.body, key=lambda node: not isinstance(node, ast.Assign))
    return list(walk(marks, path.removeprefix("tests/")))


def _marks(node: ast.expr) -> Iterator[str]:
    """Names of the marks in a decorator or a list of marks; marks inside `pytest.param` are not of the function."""
    if isinstance(node, ast.List | ast.Tuple):
        for inner in node.elts:
            yield from _marks(inner)
        return
    while isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        yield node.attr
