"""Give each test its tier: default, full or slow.

`tests/tiers.toml` lists the cases of the tiers `full` and `slow`, by file; `"*"` is every case of a file that is not marked slow.
A file that is wholly in a tier that is not selected is not even imported: torch, TensorFlow and Lightning cost ten seconds each.
"""

import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from cpu_here import KERNELS

TESTS = Path(__file__).parent.parent
WHOLE_FILE = "*"
TIERS = ("full", "slow")

COMPLETE = 3000
"""Collected tests from which a run counts as one of everything: each case that the list names must then exist."""


def read_tiers(path: Path = TESTS / "tiers.toml") -> dict[str, dict[str, list[str]]]:
    """Read the cases of each tier: tier, file under `tests/`, names of its cases."""
    tiers = tomllib.loads(path.read_text(encoding="utf-8"))
    if unknown := tiers.keys() - set(TIERS):
        raise pytest.UsageError(f"{path.name} has tiers {sorted(unknown)}; expected {' and '.join(TIERS)}")
    return {tier: tiers.get(tier, {}) for tier in TIERS}


def case_of(item: pytest.Item) -> tuple[str, str]:
    """Split an item's node id into its file under `tests/` and its case."""
    file, _, case = item.nodeid.removeprefix("tests/").partition("::")
    return file, case


def pytest_configure(config: pytest.Config) -> None:
    """Read the list once for each process."""
    config.stash[_LIST] = read_tiers()


_LIST = pytest.StashKey[dict[str, dict[str, list[str]]]]()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files in which nothing is selected: every case is in a tier that `-m` excludes."""
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(TESTS):
        return None
    file = collection_path.relative_to(TESTS).as_posix()
    file_tiers = [tier for tier in TIERS if WHOLE_FILE in config.stash[_LIST][tier].get(file, ())]
    if not file_tiers:
        return None
    expression = Expression.compile(config.option.markexpr or "full or slow")
    possible = {*file_tiers, "slow"}  # Single cases of the file may be marked slow.
    return True if not any(expression.evaluate(_only(tier)) for tier in possible) else None


def _only(tier: str):
    return lambda name, **_: name == tier


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each item with its tier before `-m` selects."""
    tiers = {tier: {file: set(cases) for file, cases in files.items()} for tier, files in config.stash[_LIST].items()}
    for item in items:
        file, case = case_of(item)
        marked = item.get_closest_marker("slow") is not None
        if not marked and _lists(tiers["slow"], file, case):
            # The list may move single cases of a test that is marked `full`.
            item.own_markers = [marker for marker in item.own_markers if marker.name != "full"]
            item.add_marker("slow")
        elif not marked and _lists(tiers["full"], file, case):
            item.add_marker("full")
    if len(items) > COMPLETE:
        missing = sorted(missing_cases(tiers, map(case_of, items)))
        if missing:
            # Not a UsageError: pytest-xdist shows nothing of one that a worker raises.
            raise RuntimeError(f"tests/tiers.toml lists cases that do not exist: {', '.join(missing[:20])}")


def _lists(files: dict[str, set[str]], file: str, case: str) -> bool:
    cases = files.get(file, ())
    return case in cases or WHOLE_FILE in cases


def missing_cases(tiers: dict[str, dict[str, set[str]]], collected: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Find the listed cases that were not collected, in files of which something was."""
    existing: dict[str, set[str]] = {}
    for file, case in collected:
        existing.setdefault(file, set()).add(case)
    for tier, files in tiers.items():
        for file, cases in files.items():
            if file in existing:
                gone = cases - existing[file] - {WHOLE_FILE}
                yield from (f"{file}::{case}" for case in gone if not is_of_another_machine(case))
            elif not (TESTS / file).exists():
                yield f"{file} ({tier})"


def is_of_another_machine(case: str) -> bool:
    """True if a case names a library of CPU kernels that this machine doesn't have."""
    parameters = case.partition("[")[2].rstrip("]").split("-")
    return not {"c", "mkl"}.isdisjoint(set(parameters) - set(KERNELS))


def commit_count() -> int:
    """Number of commits that lead to the one checked out; 0 outside a clone."""
    command = ["git", "-C", str(TESTS), "rev-list", "--count", "HEAD"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return 0
