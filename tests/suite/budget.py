"""Print what each room's tests took beside its budget in `tests/budget.toml`.

A room's seconds are those of its tests, all workers' together, divided by the number of workers. They are printed after a run
of the whole default tier; an overrun is a warning that names the five longest tests.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from cpu_here import HAS_AVX512

from .tiers import COMPLETE, TESTS

COLLECTION = "collection"
"""The budget's line for time outside of tests: starting workers and importing."""

ALLOWANCE = 1.0 if HAS_AVX512 else 1.25
"""The budgets are for processors with AVX-512; the others that this project is tested on are slower by about this factor."""

LONGEST = 5
"""Tests that are named of a room that is over its budget."""


def read_budget(path: Path = TESTS / "budget.toml") -> dict[str, dict[str, float]]:
    """Read the tables `default` (seconds of each room) and `stages` (minutes of each stage of `.ci/run`)."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def room_of(case: str) -> str:
    """The room of a case, given by its path under `tests/`.

    >>> room_of("plan/test_auto.py::test_one")
    'plan'
    """
    return case.partition("/")[0]


def seconds_by_room(wall: Mapping[str, float], workers: int) -> dict[str, float]:
    """Sum the tests' seconds over each room, per worker."""
    rooms: dict[str, float] = {}
    for case, seconds in wall.items():
        rooms[room_of(case)] = rooms.get(room_of(case), 0.0) + seconds / workers
    return rooms


def compare_rooms(
    wall: Mapping[str, float], budget: Mapping[str, float], workers: int, *, allowance: float = 1.0
) -> list[str]:
    """Lines of a table of seconds used and allowed, and warnings.

    Args:
        wall: Seconds of each case.
        budget: Seconds of each room.
        workers: Processes that ran tests at the same time.
        allowance: Factor for the budgets on this processor.
    """
    budget = {room: seconds * allowance for room, seconds in budget.items()}
    used = seconds_by_room(wall, workers)
    lines = [f"{'room':14}{'seconds':>9}{'budget':>8}"]
    warnings = []
    for room in sorted(used.keys() | budget.keys() - {COLLECTION}):
        allowed = budget.get(room, 0.0)
        lines.append(f"{room:14}{used.get(room, 0.0):9.1f}{allowed:8.0f}")
        if used.get(room, 0.0) > allowed:
            longest_cases = sorted(((s, case) for case, s in wall.items() if room_of(case) == room), reverse=True)[
                :LONGEST
            ]
            longest = ", ".join(f"{case} ({seconds:.1f} s)" for seconds, case in longest_cases)
            warnings.append(f"warning: {room} took {used[room]:.0f} s of {allowed:.0f} s; its longest tests: {longest}")
    total = sum(budget.values())
    lines.append(f"{'all tests':14}{sum(used.values()):9.1f}{total - budget.get(COLLECTION, 0.0):8.0f}")
    return [*lines, *warnings]


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Print the table after a run of the whole default tier."""
    durations = config.pluginmanager.get_plugin("panax-durations")
    expression = config.option.markexpr or ""
    if durations is None or "not full" not in expression or len(durations.wall) < COMPLETE:
        return
    workers = config.getoption("numprocesses", None) or 1
    terminalreporter.section("seconds of each room, per worker, and its budget (two quiet cores, empty cache)")
    for line in compare_rooms(durations.wall, read_budget()["default"], workers, allowance=ALLOWANCE):
        terminalreporter.write_line(line)
    if ALLOWANCE != 1.0:
        terminalreporter.write_line(f"budgets are {ALLOWANCE:g} times those of tests/budget.toml: no AVX-512 here")
