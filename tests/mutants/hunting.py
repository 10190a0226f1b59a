"""Whether the tests that a fault affects find it."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from affected_tests import AffectedFile, affected_files, fill_budget, listed_names
from changed_files import Changes
from failures import FILE, IMPORT
from import_graph import ImportGraph
from only_listed import LIST
from planting import Fault
from recorded_times import RecordedTimes

FOUND, SURVIVED, BROKEN, TIMED_OUT, UNTESTED, MISFIT = (
    "found", "survived", "broken at import", "timed out", "no affected test", "does not fit",
)  # fmt: skip
HERE = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a fault.

    Attributes:
        by: The test that found it, or the file that couldn't be imported.
        tests: Tests that could have found it within the budget.
    """

    fault: Fault
    result: str
    by: str = ""
    tests: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.fault), "result": self.result, "by": self.by, "tests": self.tests,
                "seconds": round(self.seconds, 1)}  # fmt: skip


class Hunt:
    """Plants faults in a checkout, one at a time, and runs the affected tests.

    Attributes:
        tree: A checkout of its own: its sources are changed, and restored after each fault.
    """

    def __init__(
        self,
        tree: Path,
        folder: Path,
        *,
        budget_seconds: float,
        workers: int,
        all_tiers: bool,
        options: Sequence[str] = (),
    ):
        """Read the import graph of `tree`.

        Args:
            folder: Holds the caches of these tests, shared by all faults.
            options: Passed on to pytest.
        """
        self.tree, self.folder = tree, folder
        self.budget_seconds, self.workers, self.all_tiers, self.options = budget_seconds, workers, all_tiers, options
        self.graph = ImportGraph(tree)
        self.times = RecordedTimes.read(tree, all_tiers=all_tiers)
        # Tests that fail without any fault find nothing; those that pass without one are run once to know it.
        self.failing: list[str] = []
        self._passing: set[str] = set()

    def tests_of(self, path: str) -> list[AffectedFile]:
        """The tests that a change of this file affects, within the budget; nearest first."""
        files = affected_files(self.graph, Changes("", (path,), ()), self.times, all_tiers=self.all_tiers)
        return fill_budget(files, self.budget_seconds, self.workers)

    def try_fault(self, fault: Fault) -> Outcome:
        """Plant a fault, run the tests it affects, and restore the file."""
        begun, source = time.monotonic(), self.tree / fault.path
        try:
            clean = source.read_text(encoding="utf-8")
            planted = fault.plant(clean)
        except (OSError, ValueError):
            return Outcome(fault, MISFIT)
        chosen = self.tests_of(fault.path)
        count = sum(len(file.cases) for file in chosen)
        if not count:
            return Outcome(fault, UNTESTED)

        def outcome(result: str, by: str = "") -> Outcome:
            return Outcome(fault, result, by, count, time.monotonic() - begun)

        names = listed_names(chosen)
        paths = [file.path for file in chosen]
        while True:
            source.write_text(planted, encoding="utf-8")
            try:
                code, failures = self._pytest(paths, names)
            finally:
                source.write_text(clean, encoding="utf-8")
            if code is None:
                return outcome(TIMED_OUT)
            if code in (0, 5):
                return outcome(SURVIVED)
            imports = [line.removeprefix(IMPORT) for line in failures if line.startswith(IMPORT)]
            if imports or not failures:
                return outcome(BROKEN, imports[0] if imports else "conftest.py")
            # A test that fails without the fault as well has found nothing.
            name = failures[0].removeprefix("tests/")
            if name not in self._passing and self._pytest([failures[0].partition("::")[0]], [name])[0] == 0:
                self._passing.add(name)
            if name in self._passing:
                return outcome(FOUND, name)
            if name in self.failing:
                return outcome(SURVIVED)
            self.failing.append(name)

    def _pytest(self, paths: Sequence[str], names: Sequence[str]) -> tuple[int | None, list[str]]:
        """Run tests until the first failure: the exit code (None if they don't end), and what failed."""
        listed, failed = self.folder / "tests.txt", self.folder / "failed.txt"
        listed.write_text("\n".join(names), encoding="utf-8")
        failed.write_text("", encoding="utf-8")
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        modules = (self.tree / "src", self.tree / "recipes", HERE, HERE.parent / "affected", HERE.parent)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, modules)),
            # A file that changes twice within a second would be read from its old bytecode.
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(temporary),
            "PANAX_TEST_CACHE": str(self.folder / "programs"),
            LIST: str(listed),
            FILE: str(failed),
        }
        workers = min(self.workers, len(paths))
        command = [
            sys.executable, "-m", "pytest", "-x", "-n", str(workers if workers > 1 else 0), "-p", "only_listed",
            "-p", "failures", "-p", "no:cacheprovider", *(["-m", "not gpu and not tpu"] if self.all_tiers else []),
            *(f"--deselect=tests/{name}" for name in self.failing), *self.options, *paths,
        ]  # fmt: skip
        child = subprocess.Popen(
            command, cwd=self.tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(timeout=3 * self.budget_seconds + 120)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # Also what tests have started and left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return code, list(dict.fromkeys(failed.read_text(encoding="utf-8").splitlines()))
