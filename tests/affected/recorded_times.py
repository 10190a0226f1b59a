"""What each test takes: recorded seconds where there are any, otherwise an estimate."""

import ast
import json
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

DEFAULT_SECONDS = 3.0
"""Seconds of a test function without any recorded duration in the suite."""

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
    """

    def __init__(self, seconds: Mapping[str, float] | None = None, left_out: frozenset[str] = frozenset()):
        """Take durations, without the cases in `left_out` (of slower tiers)."""
        self.seconds = {name: value for name, value in (seconds or {}).items() if name not in left_out}
        self._slow_functions = {name.partition("[")[0] for name in left_out}
        self._of_function: dict[str, list[Case]] = {}
        for name, value in self.seconds.items():
            self._of_function.setdefault(name.partition("[")[0], []).append(Case(name, value))
        sums = [sum(case.seconds for case in cases) for cases in self._of_function.values()]
        self.default = statistics.median(sums) if sums else DEFAULT_SECONDS

    @classmethod
    def read(cls, root: Path, *, all_tiers: bool = False) -> "RecordedTimes":
        """Read `tests/durations.json` and the list of slow cases, if they exist.

        Raises:
            ValueError: The file is not of the expected form.
        """
        path = root / "tests/durations.json"
        left_out = frozenset() if all_tiers else slow_cases(root)
        if not path.exists():
            return cls(None, left_out)
        try:
            return cls({name: float(row[0]) for name, row in json.loads(path.read_text()).items()}, left_out)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(
                f'{path} should map "path::test[param]" to [wall seconds, CPU seconds]; {error}. '
                "Write it again with `pytest --write-durations tests/durations.json`"
            ) from error

    def cases(self, name: str) -> list[Case]:
        """The recorded cases of a test function; if there are none, a single one with an estimate."""
        if recorded := self._of_function.get(name):
            return recorded
        # If other tests have been recorded, a function with slow cases alone is not of this tier.
        return [] if self.seconds and name in self._slow_functions else [Case(name, self.default)]


def slow_cases(root: Path) -> frozenset[str]:
    """The cases that `tests/slow_cases.py` names."""
    path = root / "tests/slow_cases.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return frozenset()
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return frozenset(text for text in texts if re.search(r"\.py::", text))


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
    """Names of the marks in a decorator or a list of marks; marks inside of `pytest.param` are not of the function."""
    if isinstance(node, ast.List | ast.Tuple):
        for inner in node.elts:
            yield from _marks(inner)
        return
    while isinstance(node, ast.Call):
        node = node.func
    if isinstance(node, ast.Attribute):
        yield node.attr
