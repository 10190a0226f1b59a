"""Taking the golden runs of one checkout, in a process for each group."""

import concurrent.futures
import difflib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RUNS = "tests/golden/runs.py"
TIMEOUT_SECONDS = 1200


class UnknownRunError(ValueError):
    """A name that is not a run of either commit."""


def names_of(tree: Path, described: str, variables: Mapping[str, str]) -> list[str]:
    """The names of a checkout's runs.

    Raises:
        RuntimeError: The checkout has no golden runs, or they can't be listed.
    """
    if not (tree / RUNS).exists():
        raise RuntimeError(f"{described} has no {RUNS}; compare commits that have it")
    listed = subprocess.run([sys.executable, RUNS, "--list"], cwd=tree, env=variables, capture_output=True, text=True)
    if listed.returncode:
        raise RuntimeError(f"{described}: {RUNS} --list failed:\n{listed.stderr.strip()}")
    return listed.stdout.split()


def choose(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """The names that `only` selects: runs as GROUP/NAME, or whole groups; all for none.

    Raises:
        UnknownRunError: A name selects nothing; the message has the nearest one.
    """
    groups = {name.partition("/")[0] for name in names}
    for asked in only:
        if asked not in groups and asked not in names:
            nearest = difflib.get_close_matches(asked, [*names, *groups], 1, 0.0)
            raise UnknownRunError(f"{asked!r} is not a golden run; did you mean {nearest[0]!r}?")
    return [name for name in names if not only or {name, name.partition("/")[0]} & set(only)]


class Taker:
    """Takes runs in child processes, which end with it.

    Attributes:
        jobs: Groups that run at the same time.
    """

    def __init__(self, jobs: int = 1):
        self.jobs = jobs
        self._children: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def take(
        self, tree: Path, names: Iterable[str], folder: Path, variables: Mapping[str, str], say: Callable[[str], None]
    ) -> dict[str, dict[str, Any]]:
        """Name to the answer of each run: `rows` or `error`, and `seconds`."""
        groups: dict[str, list[str]] = {}
        for name in names:
            group, _, member = name.partition("/")
            groups.setdefault(group, []).append(member)
        answers: dict[str, dict[str, Any]] = {}
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            futures = {
                pool.submit(self._take_group, tree, group, members, folder, variables): group
                for group, members in groups.items()
            }
            try:
                for future in concurrent.futures.as_completed(futures):
                    golden_rows = future.result()
                    answers |= golden_rows
                    seconds, used = (
                        sum(answer.get(name, 0.0) for answer in golden_rows.values())
                        for name in ("seconds", "cpu_seconds")
                    )
                    failed = [name for name, answer in golden_rows.items() if "error" in answer]
                    note = f", failed: {', '.join(failed)}" if failed else ""
                    say(f"{futures[future]}: {len(golden_rows)} runs in {seconds:.0f} s, {used:.0f} s of CPU{note}")
            except BaseException:
                self.stop()
                pool.shutdown(cancel_futures=True)
                raise
        return answers

    def stop(self) -> None:
        """Kill the children that still run."""
        with self._lock:
            self._stopped = True
            for child in self._children:
                child.kill()

    def _take_group(
        self, tree: Path, group: str, members: Sequence[str], folder: Path, variables: Mapping[str, str]
    ) -> dict[str, dict[str, Any]]:
        out = folder / f"{group}.jsonl"
        out.touch()
        command = [
            sys.executable, RUNS, group, "--only", *members, "--out", str(out), "--folder", str(folder / group),
        ]  # fmt: skip
        with self._lock:
            if self._stopped:
                return {}
            child = subprocess.Popen(
                command, cwd=tree, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            self._children.add(child)
        try:
            printed, _ = child.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            printed, _ = child.communicate()
            printed += f"\nkilled after {TIMEOUT_SECONDS} s"
        finally:
            with self._lock:
                self._children.discard(child)
        answers = {answer["name"]: answer for answer in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
        ending = f"{printed}\nthe process of this group ended with exit code {child.returncode}"
        missing = {f"{group}/{member}": {"error": ending} for member in members if f"{group}/{member}" not in answers}
        return answers | missing
