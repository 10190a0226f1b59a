"""Tiers, budgets, shares of slow tests and recorded durations."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from suite import budget, records, selection, slow_share, stages, tiers

TESTS = Path(__file__).parent.parent


def configuration(expression: str, listed: dict[str, dict[str, list[str]]]) -> pytest.Config:
    """As much of pytest's configuration as the plugin for tiers reads."""
    config = SimpleNamespace(option=SimpleNamespace(markexpr=expression), stash={tiers._LIST: listed})
    return config  # pyright: ignore[reportReturnType]


DEFAULT = "not slow and not full and not gpu and not tpu"
LISTED = {"full": {"suite/test_suite.py": ["*"]}, "slow": {}}


@pytest.mark.parametrize(
    ("expression", "ignored"), [(DEFAULT, True), ("full", None), ("slow", None), ("gpu", True), ("", None)]
)
def test_a_file_is_not_imported_if_nothing_in_it_can_be_selected(expression, ignored):
    assert tiers.pytest_ignore_collect(Path(__file__), configuration(expression, LISTED)) is ignored


def test_a_file_without_a_tier_is_always_imported():
    assert tiers.pytest_ignore_collect(Path(__file__), configuration(DEFAULT, {"full": {}, "slow": {}})) is None


class Item:
    """A collected test."""

    def __init__(self, nodeid: str, *markers: str):
        self.nodeid = nodeid
        self.own_markers = [SimpleNamespace(name=marker) for marker in markers]

    @property
    def markers(self) -> list[str]:
        return [marker.name for marker in self.own_markers]

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None

    def add_marker(self, name: str) -> None:
        self.own_markers.append(SimpleNamespace(name=name))


def test_each_case_gets_one_tier():
    listed = {"full": {"a.py": ["x[1]"], "b.py": ["*"]}, "slow": {"a.py": ["x[2]"]}}
    names = ("tests/a.py::x[1]", "tests/a.py::x[2]", "tests/a.py::x[3]", "tests/b.py::y")
    # The list may move a case of a test that is marked `full`.
    items = [*map(Item, names), Item("tests/b.py::z", "slow"), Item("tests/a.py::x[2]", "full")]
    tiers.pytest_collection_modifyitems(configuration("", listed), items)  # pyright: ignore[reportArgumentType]
    assert [item.markers for item in items] == [["full"], ["slow"], [], ["full"], ["slow"], ["slow"]]


def test_cases_and_files_that_no_longer_exist_are_found():
    listed = {
        "full": {"suite/test_suite.py": {"gone", "test_one", "*"}},
        "slow": {"suite/gone.py": {"x"}, "suite/tiers.py": {"x"}},
    }
    # Nothing of suite/tiers.py was collected, so nothing is known about its cases.
    missing = set(tiers.missing_cases(listed, [("suite/test_suite.py", "test_one")]))
    assert missing == {"suite/test_suite.py::gone", "suite/gone.py (slow)"}


def test_the_budgets_add_up_to_what_a_person_waits():
    tables = budget.read_budget()
    assert sum(tables["default"].values()) == 480
    assert sum(tables["stages"].values()) == 60
    assert tables["stages"]["full"] <= 14


def test_every_room_of_the_tests_has_a_budget():
    rooms = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")} - {"gpu", "tpu"}
    assert rooms == budget.read_budget()["default"].keys() - {budget.COLLECTION}


def test_an_overrun_is_a_warning_with_the_longest_tests():
    wall = {"core/a.py::one": 3.0, "core/a.py::two": 9.0, "mesh/b.py::three": 1.0}
    lines = budget.compare_rooms(wall, {"core": 5, "mesh": 5, "collection": 2}, workers=2)
    assert "all tests           6.5      10" in lines
    (warning,) = (line for line in lines if line.startswith("warning"))
    assert warning.startswith("warning: core took 6 s of 5 s")
    assert warning.index("core/a.py::two (9.0 s)") < warning.index("core/a.py::one (3.0 s)")
    assert not any("warning" in line for line in budget.compare_rooms(wall, {"core": 6, "mesh": 5}, workers=2))


def test_stages_are_compared_with_their_minutes():
    lines = stages.compare_stages([("install", 120.0), ("full", 30.0), ("full", 60.0)], {"install": 1, "full": 2})
    assert lines[1:] == [
        "install             2.0       1",
        "full                1.5       2",
        "all                 3.5       3",
        "warning: install took 2.0 minutes of 1",
        "warning: all took 3.5 minutes of 3",
    ]
    with pytest.raises(ValueError, match="'ful' has no budget"):
        stages.compare_stages([("ful", 1.0)], {"full": 1})


def test_every_stage_of_ci_has_a_budget(tmp_path):
    text = (TESTS.parent / ".ci/run").read_text()
    named = [line.split()[1] for line in text.splitlines() if line.startswith("stage ")]
    assert named[-1] == "done" and set(named[:-1]) == budget.read_budget()["stages"].keys()
    recorded = tmp_path / "stages"
    recorded.write_text("".join(f"61\t{name}\n" for name in named[:-1]))
    shown = subprocess.run(
        [sys.executable, TESTS / "suite/stages.py", recorded], capture_output=True, text=True, check=True
    )
    assert all(name in shown.stdout for name in named[:-1])


def test_successive_shares_hold_every_slow_case_once():
    names = [f"{file}.py::{case}" for file in "abc" for case in range(7)]
    durations = {name: (float(10 + number), 1.0) for number, name in enumerate(names)}
    shares = slow_share.cut_into_shares(names, durations, seconds=60.0, workers=2)
    assert [name for share in shares for name in share] == names
    assert all(sum(durations[name][0] for name in share) <= 120.0 for share in shares)
    assert len(shares) <= 4
    assert slow_share.cut_into_shares([], {}, seconds=60.0) == []
    # A case that is longer than a share has one of its own.
    assert slow_share.cut_into_shares(["a", "b"], {"a": (500.0, 1.0)}, seconds=60.0) == [["a"], ["b"]]


def test_a_share_leaves_out_what_needs_an_engine_that_is_not_there(monkeypatch):
    monkeypatch.setattr(slow_share, "ENGINES", {"engines/test_slurm": lambda: False, "engines/test_ray": lambda: True})
    assert slow_share.absent_engines() == ["engines/test_slurm"]


def test_a_campaign_is_in_no_share():
    def item(*arguments):
        marker = SimpleNamespace(args=arguments) if arguments else None
        return SimpleNamespace(get_closest_marker=lambda name: marker if name == "timeout" else None)

    assert [slow_share.is_campaign(each) for each in (item(), item(300), item(301))] == [False, False, True]  # pyright: ignore[reportArgumentType]


def test_a_worker_sends_its_share_to_the_process_that_reports():
    worker, controller = (
        SimpleNamespace(stash={slow_share._SHARE: (2, 9, 4)}, workeroutput={}),
        SimpleNamespace(stash={}),
    )
    slow_share.pytest_sessionfinish(SimpleNamespace(config=worker))  # pyright: ignore[reportArgumentType]
    slow_share.pytest_testnodedown(SimpleNamespace(workeroutput=worker.workeroutput, config=controller))
    assert slow_share.describe_share(*controller.stash[slow_share._SHARE]).startswith("slow share 2 of 9 (4 cases)")


def test_recorded_durations_are_merged(tmp_path):
    path = tmp_path / "durations.json"
    assert records.read_durations(path) == {}
    records.write_durations({"a.py::x[1]": (1.23, 2.0), "b.py::y": (5.0, 5.0), "b.py::short": (0.05, 0.1)}, path)
    records.write_durations({"b.py::y": (0.01, 0.0), "c.py::z::w": (3.0, 0.5)}, path)
    assert records.read_durations(path) == {"a.py::x[1]": (1.2, 2.0), "c.py::z::w": (3.0, 0.5)}
    assert json.loads(path.read_text()) == {"a.py::x[1]": [1.2, 2.0], "c.py::z::w": [3.0, 0.5]}


@pytest.mark.parametrize(
    ("arguments", "slow"),
    [
        (["pytest"], False),
        (["pytest", "-m", "full"], False),
        (["pytest", "-m", "slow", "--share", "6"], True),
        (["pytest", "-mslow"], True),
        (["pytest", "-m", "not gpu and not tpu", "tests"], True),
    ],
)
def test_the_emitter_of_a_run_is_used_if_slow_tests_may_be_selected(arguments, slow, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("PANAX_TEST_SELECTS_SLOW", "")
    assert selection.selects_slow(arguments) == slow
    # A worker has another command line, and its controller's environment.
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert selection.selects_slow(["-c"]) == slow
