"""Select a share of the slow tests: `pytest -m slow --share MINUTES`.

The slow cases are cut, file by file, into shares that each take the given minutes by the recorded durations. The number of
commits chooses the share, so that successive runs take successive ones and none goes stale.
"""

import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence

import pytest

from .records import read_durations
from .tiers import case_of, commit_count

LONGEST_SECONDS = 300.0
"""Maximum time of a slow test; a longer campaign is a command with a dated result."""

UNKNOWN_SECONDS = 45.0
"""Assumed for a slow case that has never been recorded."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flags that choose a share."""
    parser.addoption(
        "--share",
        type=float,
        metavar="MINUTES",
        help="with -m slow: run a share that takes about MINUTES, by the commit",
    )
    parser.addoption("--share-number", type=int, metavar="N", help="with --share: run share N instead (from 1)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests outside of the share."""
    minutes = config.getoption("--share")
    if minutes is None:
        return
    if any(item.get_closest_marker("slow") is None for item in items):
        raise pytest.UsageError("--share selects among slow tests; run `pytest -m slow --share MINUTES`")
    absent = tuple(absent_engines())
    left_out = [item for item in items if is_campaign(item) or case_of(item)[0].startswith(absent)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
    names = ["::".join(case_of(item)) for item in items]
    shares = cut_into_shares(names, read_durations(), seconds=60.0 * minutes, workers=_workers(config))
    number = config.getoption("--share-number") or commit_count() % max(1, len(shares)) + 1
    if not 1 <= number <= len(shares):
        raise pytest.UsageError(f"--share-number {number}: there are {len(shares)} shares of {minutes:g} minutes")
    chosen = set(shares[number - 1])
    config.stash[_SHARE] = (number, len(shares), len(chosen))
    config.hook.pytest_deselected(items=[item for name, item in zip(names, items) if name not in chosen])
    items[:] = [item for name, item in zip(names, items) if name in chosen]


def absent_engines() -> list[str]:
    """Prefixes of files with tests that need an engine that is not installed: a share runs on a machine that has none of them."""
    return [file for file, there in ENGINES.items() if not there()]


def is_campaign(item: pytest.Item) -> bool:
    """True if a test has allowed itself more time than a slow test may take: it is run by `pytest -m slow` alone."""
    marker = item.get_closest_marker("timeout")
    return marker is not None and bool(marker.args) and marker.args[0] > LONGEST_SECONDS


ENGINES = {
    "engines/test_slurm": lambda: shutil.which("slurmctld") is not None,
    "engines/test_mpi": lambda: all(map(shutil.which, ("mpirun.openmpi", "mpirun.mpich"))),
    "engines/test_ray": lambda: importlib.util.find_spec("ray") is not None,
    "kernels/cpu/test_aarch64": lambda: shutil.which("qemu-aarch64") is not None,
    "engines/test_kubernetes": lambda: shutil.which("kubectl") is not None,
}
"""How files of tests begin that need an engine, and whether it is there."""

_SHARE = pytest.StashKey[tuple[int, int, int]]()


def _workers(config: pytest.Config) -> int:
    """Number of processes that run tests: of this run, as its controller or as one of its workers."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)) or config.getoption("numprocesses", None) or 1


def cut_into_shares(
    names: Sequence[str], durations: Mapping[str, tuple[float, float]], *, seconds: float, workers: int = 1
) -> list[list[str]]:
    """Cut cases into successive shares that take `seconds` each on so many workers.

    >>> cut_into_shares(["a.py::x", "a.py::y", "b.py::z"], {"a.py::x": (50, 50), "a.py::y": (5, 5)}, seconds=60)
    [['a.py::x', 'a.py::y'], ['b.py::z']]
    """
    shares: list[list[str]] = []
    used = float("inf")
    for name in names:
        cost = durations.get(name, (UNKNOWN_SECONDS, 0.0))[0] / workers
        if used + cost > seconds:
            shares.append([])
            used = 0.0
        shares[-1].append(name)
        used += cost
    return shares


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the share from a worker, which has collected the tests, to the process that reports."""
    if _SHARE in session.config.stash and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["slow_share"] = session.config.stash[_SHARE]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    """Receive the share from a worker."""
    if share := getattr(node, "workeroutput", {}).get("slow_share"):
        node.config.stash[_SHARE] = tuple(share)


def describe_share(number: int, count: int, cases: int) -> str:
    """One line about a share."""
    return f"slow share {number} of {count} ({cases} cases); the whole of slow has run after {count} successive shares"


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Report which share ran, and name the tests that take longer than a slow test may."""
    if _SHARE in config.stash:
        terminalreporter.write_line(describe_share(*config.stash[_SHARE]))
        if absent := absent_engines():
            names = ", ".join(f"{file}*" for file in absent)
            terminalreporter.write_line(f"left out, for want of their engines (tests/engines/install.sh): {names}")
    durations = config.pluginmanager.get_plugin("panax-durations")
    for case, seconds in durations.wall.items() if durations is not None else ():
        if seconds > LONGEST_SECONDS:
            terminalreporter.write_line(
                f"warning: {case} took {seconds:.0f} s of {LONGEST_SECONDS:.0f} s; "
                "split it, or make it a command with a dated result"
            )
