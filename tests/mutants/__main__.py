"""Plant faults in the sources, one at a time, and report which of them the tests find.

    python tests/mutants [--room ROOM ...] [--count N] [--seed S] [--tier default|all] [--write FILE]
    python tests/mutants --replay FILE [--tests-of COMMIT] [--write FILE]

A fault is a sign, an axis, an off-by-one or a missing reduction, in a temporary checkout of HEAD. For each, the tests
that it affects run within --budget seconds until one fails. --replay takes the faults of a file that --write has
written, and with --tests-of the tests of another commit: so two versions of the suite meet the same faults.
"""  # fmt: skip

import argparse
import difflib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "affected"))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from affected_tests import room_of
from checkouts import checkout, git
from hunting import BROKEN, FOUND, MISFIT, SURVIVED, TIMED_OUT, UNTESTED, Hunt, Outcome
from planting import Fault, draw

ROOT = Path(__file__).resolve().parents[2]
RESULTS = (FOUND, SURVIVED, BROKEN, TIMED_OUT, UNTESTED, MISFIT)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tests/mutants", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--room", nargs="+", metavar="ROOM", help="folders of src/panax (default: all)")
    parser.add_argument("--count", type=int, default=20, help="faults in each room (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of faults (default: %(default)s)")
    parser.add_argument("--tier", choices=("default", "all"), default="default", help="tests that may find a fault")
    parser.add_argument(
        "--budget", type=float, default=120.0, help="seconds of tests for a fault (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest (default: %(default)s)")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="the faults of a file that --write has written")
    parser.add_argument("--tests-of", metavar="COMMIT", help="take tests/ and pytest's settings of another commit")
    parser.add_argument("--sources-of", metavar="COMMIT", help="plant in another commit (default: HEAD, or FILE's)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write faults and results as JSON")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="another repository (default: this one)")
    options, passed_on = parser.parse_known_args(arguments)
    if options.count < 1 or options.budget <= 0 or options.workers < 1:
        parser.error("--count, --budget and --workers should be 1 or more")
    if options.replay and options.room:
        parser.error("--replay has its own faults; leave --room out")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # A shell that starts it in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run(options, passed_on)
    except (RuntimeError, ValueError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted; the temporary checkout is removed", file=sys.stderr)
        return 130


def run(options: argparse.Namespace, passed_on: Sequence[str]) -> int:
    """Draw or read the faults and try each; the exit code is 0 unless the command fails."""
    root = options.root.resolve()
    replayed = read_faults(options.replay) if options.replay else None
    source = options.sources_of or (replayed[0] if replayed else "HEAD")
    commit, tests_of = (
        git(root, "rev-parse", "--verify", f"{name}^{{commit}}").strip()
        for name in (source, options.tests_of or source)
    )
    outcomes: list[Outcome] = []
    with checkout(root, commit) as tree, tempfile.TemporaryDirectory(
        prefix="panax-mutants-", ignore_cleanup_errors=True
    ) as folder:  # fmt: skip
        if tests_of != commit:
            take_tests_of(tree, tests_of)
        faults = replayed[1] if replayed else draw_faults(tree, options.room, options.count, options.seed)
        if options.list:
            print("\n".join(fault.described for fault in faults))
            return 0
        hunt = Hunt(
            tree, Path(folder), budget_seconds=options.budget, workers=options.workers,
            all_tiers=options.tier == "all", options=passed_on,
        )  # fmt: skip
        print(f"{len(faults)} faults in {commit[:12]}, tests of {tests_of[:12]}", flush=True)
        begun = time.monotonic()
        try:
            for fault in faults:
                outcome = hunt.try_fault(fault)
                outcomes.append(outcome)
                by = f" by {outcome.by}" if outcome.by else f" ({outcome.tests} tests)"
                print(f"{time.monotonic() - begun:6.0f} s  {fault.described}: {outcome.result}{by}", flush=True)
        finally:
            print(table(outcomes))
            for name in hunt.failing:
                print(f"fails without any fault, and was left out: {name}")
            if options.write:
                options.write.write_text(as_json(options, commit, tests_of, outcomes), encoding="utf-8")
    return 0


def rooms_of(tree: Path) -> list[str]:
    return sorted(path.parent.name for path in (tree / "src/panax").glob("*/__init__.py"))


def draw_faults(tree: Path, rooms: Sequence[str] | None, count: int, seed: int) -> list[Fault]:
    """Draw `count` faults of each room.

    Raises:
        ValueError: There is no such room.
    """
    known = rooms_of(tree)
    for room in rooms or ():
        if room not in known:
            nearest = difflib.get_close_matches(room, known, 1, 0.0)
            raise ValueError(f"{room!r} is not a room of src/panax; did you mean {nearest[0]!r}?" if nearest else room)
    faults: list[Fault] = []
    for room in rooms or known:
        paths = sorted((tree / "src/panax" / room).rglob("*.py"))
        sources = {path.relative_to(tree).as_posix(): path.read_text(encoding="utf-8") for path in paths}
        # Rooms draw independently: the faults of one don't depend on which others are asked for.
        faults += draw(sources, count, seed)
    return faults


def read_faults(path: Path) -> tuple[str, list[Fault]]:
    """The commit and the faults of a file that this command has written.

    Raises:
        ValueError: The file is of another form.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        names = ("path", "kind", "line", "start", "old", "new")
        return values["commit"], [Fault(**{name: row[name] for name in names}) for row in values["faults"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} was not written by --write: {error!r}") from error


def take_tests_of(tree: Path, commit: str) -> None:
    """Replace the tests of a checkout, and the settings of pytest, by those of another commit."""
    git(tree, "rm", "-r", "-q", "tests")
    git(tree, "checkout", commit, "--", "tests", "pyproject.toml")


def table(outcomes: Sequence[Outcome]) -> str:
    """Rooms by results, as Markdown."""
    columns = [result for result in RESULTS if any(outcome.result == result for outcome in outcomes)]
    lines = [f"| room | faults | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    rooms = sorted({room_of(outcome.fault.path) or "" for outcome in outcomes})
    for room in [*rooms, *(["all"] if len(rooms) > 1 else [])]:
        own = [outcome for outcome in outcomes if room in ("all", room_of(outcome.fault.path))]
        counts = [str(sum(outcome.result == result for outcome in own)) for result in columns]
        lines.append(f"| {room} | {len(own)} | {' | '.join(counts)} |")
    return "\n".join(lines)


def as_json(options: argparse.Namespace, commit: str, tests_of: str, outcomes: Sequence[Outcome]) -> str:
    values: dict[str, Any] = {
        "commit": commit,
        "tests_of": tests_of,
        "seed": options.seed,
        "tier": options.tier,
        "budget_seconds": options.budget,
        "faults": [outcome.as_json() for outcome in outcomes],
    }
    return json.dumps(values, indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(main())
