"""The test files that a change affects, nearest first, and those of them that fit a time budget."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from changed_files import Changes
from import_graph import ImportGraph
from recorded_times import Case, RecordedTimes, test_functions

FARTHEST = 3
"""Imports between a test and a changed module, beyond which the test doesn't count as affected."""

START_SECONDS = 20.0
"""Wall seconds until the first test runs: imports, run-time checks and collection."""


@dataclasses.dataclass(frozen=True)
class AffectedFile:
    """A test file and the reason it is affected.

    Attributes:
        distance: 0 if the file itself changed, otherwise imports to the nearest changed file, less a half for the tests
            of its room.
        reason: The changed file and the imports that lead to it.
        cases: Its test functions or cases with their seconds.
        whole: These are all of them.
    """

    path: str
    distance: float
    reason: str
    cases: tuple[Case, ...]
    whole: bool = True

    @property
    def seconds(self) -> float:
        return sum(case.seconds for case in self.cases)


def affected_files(
    graph: ImportGraph, changes: Changes, times: RecordedTimes, *, farthest: int = FARTHEST, all_tiers: bool = False
) -> list[AffectedFile]:
    """Find the test files that `changes` affect, nearest first.

    Five rules: the file changed; it imports a changed file, directly or by up to `farthest` imports; its folder is that of
    the changed file's room; a `conftest.py` above it is affected; it names a changed file that is not Python. Changed
    Markdown and recipes also affect the tests of the documentation.
    """
    reasons: dict[str, tuple[float, str]] = {}

    def affect(path: str, distance: float, reason: str) -> None:
        if distance < reasons.get(path, (float("inf"), ""))[0]:
            reasons[path] = (distance, reason)

    tests = [path for path in graph.modules if is_test_file(path) and path not in changes.deleted]
    changed = [*changes.changed, *changes.deleted]
    starts = {path for path in changed if path in graph.modules}
    for path in changed:
        if path not in graph.modules:
            starts |= _files_that_name(graph, path)
    distances, through = nearest_changes(graph.importers(), starts)
    rooms = {room for path in changed if (room := room_of(path))}
    for path in tests:
        if path in changes.changed:
            affect(path, 0.0, "changed")
        elif path in distances and distances[path] == 0:
            affect(path, 1.0, "names a changed file")
        in_room = any(path.startswith(f"tests/{room}/") for room in rooms)
        if 0 < distances.get(path, farthest + 1) <= farthest:
            affect(path, distances[path] - in_room / 2, _trail(path, through))
        elif in_room:
            affect(path, float(farthest), f"tests of {path.split('/')[1]}")
        for conftest in _conftests_above(path):
            if conftest in distances and conftest in graph.modules and distances[conftest] < farthest:
                affect(path, distances[conftest] + 1.0, f"{conftest}, {_trail(conftest, through)}")
        if path.startswith("tests/docs/"):
            for name in changed:
                if name.endswith(".md") or name.startswith(("recipes/", "docs/")) or name == "pyproject.toml":
                    affect(path, 1.0, f"{name} changed")
    words = {PurePosixPath(path).stem for path in changed}
    files = []
    for path, (distance, reason) in reasons.items():
        cases = _cases_of(graph, path, times, all_tiers)
        if cases or path in changes.changed:
            files.append(AffectedFile(path, distance, reason, tuple(cases)))
    return sorted(files, key=lambda file: (file.distance, -_likeness(file.path, words), file.seconds, file.path))


def fill_budget(files: Sequence[AffectedFile], budget_seconds: float, workers: int) -> list[AffectedFile]:
    """Choose tests, nearest first, that end within `budget_seconds` of wall time on `workers` processes.

    A file's tests run in one process, so none gets more than the budget. A file that doesn't fit whole is cut to the
    functions, or the cases of functions, that fit. Changed files are always chosen whole.
    """
    each = max(budget_seconds - START_SECONDS, 1.0)
    left = each * workers
    chosen = []
    for file in files:
        room = file.seconds if file.distance == 0 else min(left, each)
        fits = file.seconds <= room
        cases = list(file.cases) if fits else []
        if not fits:
            used = 0.0
            for case in sorted(file.cases, key=lambda case: case.seconds):
                if used + case.seconds <= room:
                    cases.append(case)
                    used += case.seconds
        if cases or file.distance == 0:
            chosen.append(dataclasses.replace(file, cases=tuple(cases), whole=fits))
            left -= sum(case.seconds for case in cases)
    return chosen


def listed_names(chosen: Sequence[AffectedFile]) -> list[str]:
    """Entries of the list for `only_listed`: the path of a file that runs whole, otherwise tests."""
    return [
        name
        for file in chosen
        for name in ([file.path.removeprefix("tests/")] if file.whole else [case.name for case in file.cases])
    ]


def nearest_changes(
    importers: Mapping[str, Iterable[str]], starts: Iterable[str]
) -> tuple[dict[str, int], dict[str, str]]:
    """Breadth-first distances to the nearest changed file, and for each file the next one on the way to it."""
    distances = dict.fromkeys(sorted(starts), 0)
    through: dict[str, str] = {}
    queue = list(distances)
    for path in queue:
        for importer in sorted(importers.get(path, ())):
            if importer not in distances:
                distances[importer] = distances[path] + 1
                through[importer] = path
                queue.append(importer)
    return distances, through


def is_test_file(path: str) -> bool:
    name = path.rpartition("/")[2]
    return path.startswith("tests/") and name.startswith("test_") and name.endswith(".py")


def room_of(path: str) -> str | None:
    """The room of a source file: the folder of `tests/` that tests it."""
    parts = path.split("/")
    if parts[:2] == ["src", "panax"]:
        return parts[2].removesuffix(".py") if len(parts) > 2 else None
    return {"src": "compare", "recipes": "run", "examples": "examples"}.get(parts[0])


def _cases_of(graph: ImportGraph, path: str, times: RecordedTimes, all_tiers: bool) -> list[Case]:
    tree = graph.modules[path].tree
    functions = test_functions(path, tree, all_tiers=all_tiers) if tree else []
    return [case for function in functions for case in times.cases(function)]


def _files_that_name(graph: ImportGraph, path: str) -> set[str]:
    """Python files in which a string ends with the name of a file that is not Python."""
    name = PurePosixPath(path).name
    if name in ("README.md", "__init__.py", ".gitignore"):
        return set()
    return {
        module.path
        for module in graph.modules.values()
        if any(text == name or text.endswith(f"/{name}") for text in module.strings)
    }


def _conftests_above(path: str) -> list[str]:
    folder = PurePosixPath(path).parent
    return [f"{parent}/conftest.py" for parent in (folder, *folder.parents) if str(parent) != "."]


def _trail(path: str, through: Mapping[str, str]) -> str:
    """The imports from a file to the changed one."""
    names = []
    while path in through:
        path = through[path]
        names.append(path)
    return f"imports {' -> '.join(names)}" if names else "changed"


def _likeness(path: str, words: Iterable[str]) -> float:
    """How much a test file's name is like that of a changed module."""
    name = PurePosixPath(path).stem.removeprefix("test_")
    return max((difflib.SequenceMatcher(None, name, word).ratio() for word in words), default=0.0)
