"""Run the tests that a change affects, nearest first, within a time budget.

    python tests/affected [BASE] [--budget SECONDS] [--all] [--all-tiers] [--list] [PYTEST OPTION ...]

The change is the difference between BASE (by default the commit from which this branch began) and the working tree.
The exit code is pytest's; 0 if nothing is affected.
"""  # fmt: skip

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from affected_tests import START_SECONDS, AffectedFile, affected_files, fill_budget, listed_names
from changed_files import changes_since
from import_graph import ImportGraph
from only_listed import LIST
from recorded_times import RecordedTimes

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tests/affected",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Other options are passed on to pytest.",
        allow_abbrev=False,
    )
    parser.add_argument("base", nargs="?", help="the commit to compare with")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of wall time (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="run all affected tests, however long they take")
    parser.add_argument("--all-tiers", action="store_true", help="also tests of the slower tiers")
    parser.add_argument("--list", action="store_true", help="print what would run, and run nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout (default: this one)")
    options, passed_on = parser.parse_known_args(arguments)
    if options.base and options.base.startswith("-"):
        parser.error(f"BASE should be a commit, not {options.base!r}")
    root = options.root.resolve()
    try:
        changes = changes_since(root, options.base)
        times = RecordedTimes.read(root, all_tiers=options.all_tiers)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    print(f"compared with {changes.base[:12]}: {len(changes.changed)} files changed, {len(changes.deleted)} deleted")
    graph = ImportGraph(root, changes.deleted)
    for path, reason in graph.broken.items():
        print(f"warning: {path} does not parse ({reason}); what it imports is unknown")
    files = affected_files(graph, changes, times, all_tiers=options.all_tiers)
    if not files:
        print("no test is affected")
        return 0
    chosen = files if options.all else fill_budget(files, options.budget, WORKERS)
    print_choice(files, chosen, limit=None if options.list else 40)
    if options.list or not chosen:
        return 0
    return run_pytest(root, chosen, [*(["-m", "not gpu and not tpu"] if options.all_tiers else []), *passed_on])


def print_choice(files: Sequence[AffectedFile], chosen: Sequence[AffectedFile], *, limit: int | None) -> None:
    """Print the chosen files with the reasons, and the number of tests left out."""
    num_cases = {file.path: len(file.cases) for file in files}
    for file in chosen[:limit]:
        count = (
            f"{len(file.cases)}"
            if len(file.cases) == num_cases[file.path]
            else f"{len(file.cases)} of {num_cases[file.path]}"
        )
        print(f"{file.seconds:7.1f} s  {file.path} ({count} tests): {file.reason}")
    if limit is not None and len(chosen) > limit:
        print(f"           and {len(chosen) - limit} more files")
    tests, left = sum(len(file.cases) for file in chosen), sum(num_cases.values())
    seconds = START_SECONDS + max(
        sum(file.seconds for file in chosen) / WORKERS, max((file.seconds for file in chosen), default=0.0)
    )
    print(f"{tests} of {left} affected tests in {len(chosen)} files, about {seconds:.0f} s on {WORKERS} workers")
    if left > tests:
        names = {file.path for file in chosen}
        missed = [file for file in files if file.path not in names]
        nearest = f"; the nearest file left out is {missed[0].path}" if missed else ""
        print(f"{left - tests} affected tests left out for time{nearest} (--all runs them)")


def pytest_command(root: Path, chosen: Sequence[AffectedFile], options: Sequence[str]) -> list[str]:
    """The command that runs the chosen files, the longest first."""
    longest_first = sorted(chosen, key=lambda file: -file.seconds)
    return [sys.executable, "-m", "pytest", "-p", "only_listed", *options, *(file.path for file in longest_first)]


def run_pytest(root: Path, chosen: Sequence[AffectedFile], options: Sequence[str]) -> int:
    """Run pytest on the chosen tests and return its exit code."""
    with tempfile.TemporaryDirectory(prefix="panax-affected-") as folder:
        listed = Path(folder, "tests.txt")
        listed.write_text("\n".join(listed_names(chosen)), encoding="utf-8")
        places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, LIST: str(listed), "PYTHONPATH": os.pathsep.join(places)}
        with subprocess.Popen(pytest_command(root, chosen, options), cwd=root, env=environment) as process:
            while True:
                try:
                    return process.wait()
                except KeyboardInterrupt:
                    continue  # pytest has received it as well, and ends.


if __name__ == "__main__":
    sys.exit(main())
