"""Compare short training runs of two commits, bit by bit, on this machine.

    python tests/golden [BEFORE] [AFTER] [--only NAME ...] [--list] [--jobs N]

BEFORE is HEAD by default, AFTER the working tree as it stands. Each commit takes the runs that its own
tests/golden/runs.py defines, with the kernels, the devices and the precision pinned. Nothing is recorded: values are
compared between the two alone, since another processor rounds otherwise. The exit code is 1 if any run differs or fails,
2 if the command is not understood.
"""  # fmt: skip

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checkouts import checkout
from comparison import DIFFERS, EQUAL, FAILED, Verdict, compare
from environment import environment
from taking import Taker, UnknownRunError, choose, names_of

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tests/golden",
        description=(__doc__ or "").partition("\n")[0],
        epilog="The exit code is 1 if any run differs or fails.",
    )
    parser.add_argument("before", nargs="?", default="HEAD", metavar="BEFORE", help="a commit (default: %(default)s)")
    parser.add_argument("after", nargs="?", metavar="AFTER", help="a commit (default: the working tree)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="runs (GROUP/NAME) or whole groups")
    parser.add_argument("--list", action="store_true", help="print the names of the working tree's runs")
    parser.add_argument("--jobs", type=int, default=1, help="groups that run at the same time (default: %(default)s)")
    parser.add_argument("--root", type=Path, default=ROOT, help="another repository (default: this one)")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; expected 1 or more")
    root = options.root.resolve()
    # A command that is ended by its group's SIGTERM removes its checkouts as well.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # A shell that starts it in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="panax-golden-", ignore_cleanup_errors=True) as folder:
        try:
            if options.list:
                print("\n".join(names_of(root, "the working tree", environment(root, Path(folder), Path(folder)))))
                return 0
            return run(root, options.before, options.after, options.only, options.jobs, Path(folder))
        except (RuntimeError, UnknownRunError) as error:
            parser.error(str(error))
        except KeyboardInterrupt:
            print("interrupted; the temporary checkouts are removed", file=sys.stderr)
            return 130


def run(root: Path, before: str, after: str | None, only: Sequence[str], jobs: int, folder: Path) -> int:
    """Take the runs of both commits and print the comparison; returns the exit code."""
    taker, began, answers, names = Taker(jobs), time.monotonic(), [], []
    with contextlib.ExitStack() as stack:
        sides = []
        for side, commit in (("before", before), ("after", after)):
            tree = stack.enter_context(checkout(root, commit))
            variables = environment(tree, folder / side, folder / "programs")
            sides.append((side, commit or "the working tree", tree, variables))
        listed = [names_of(tree, described, variables) for _, described, tree, variables in sides]
        names = choose(list(dict.fromkeys([*listed[0], *listed[1]])), only)
        for (side, described, tree, variables), listing in zip(sides, listed):

            def say(line: str, side: str = side) -> None:
                print(f"{time.monotonic() - began:6.0f} s  {side}: {line}", flush=True)

            say(described)
            chosen = [name for name in names if name in listing]
            answers.append(taker.take(tree, chosen, folder / side, variables, say))
    verdicts = compare(answers[0], answers[1], names)
    print_verdicts(verdicts)
    return 1 if any(verdict.outcome in (DIFFERS, FAILED) for verdict in verdicts) else 0


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Print a line for each run, and a summary."""
    for verdict in verdicts:
        print(f"{verdict.outcome:12} {verdict.name}{f': {verdict.detail}' if verdict.detail else ''}")
    equal = sum(verdict.outcome == EQUAL for verdict in verdicts)
    print(f"{equal} of {len(verdicts)} runs are equal bit by bit")


if __name__ == "__main__":
    sys.exit(main())
