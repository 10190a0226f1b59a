"""A run's log stays readable: a hook's names, a power failure and other runs' tables spoil no line."""

import csv
import json
import threading

import numpy as np
import pytest

from panax.cluster.supervisor.job_folder import INCIDENTS, read_incidents
from panax.metrics.background import BackgroundReporter
from panax.metrics.facts import RunFacts
from panax.metrics.services import CsvTracker
from panax.metrics.trackers import JsonlTracker
from panax.run.parts.run_actions import RESERVED_NAMES
from panax.run.recovery.skipped_batches import append_rollback_log
from panax.run.reporting.history import read_history
from panax.system.files import append_lines


def test_a_name_can_not_take_the_place_of_a_lines_own(tmp_path):
    log, table = JsonlTracker(tmp_path / "metrics.jsonl"), CsvTracker()
    table.about(RunFacts("name", "id", str(tmp_path), {}))
    table.begin(0, 9, None)
    for tracker in (log, table):
        tracker.record(10, {"step": 0.5, "mine": 1.0})
        tracker.close()
    assert read_history(tmp_path) == [{"step": 10, "mine": 1.0}]
    with open(tmp_path / "metrics.csv", newline="") as file:
        [row] = csv.DictReader(file)
    assert row == {"run": "id", "step": "10", "mine": "1.0"}
    assert {"step", "run"} == RESERVED_NAMES


@pytest.mark.parametrize(
    "half", [b'{"step": 20, "tra', b"", b"\xff\xff", b"x" * 200_000, b'{"step": 20, "train/loss": 9.0}']
)
@pytest.mark.parametrize("before", [b"", b'{"step": 10, "train/loss": 2.0}\n'])
def test_half_a_last_line_is_cut_when_a_run_continues(before, half, tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(before + half)
    log = JsonlTracker(tmp_path / "metrics.jsonl")
    log.record(20, {"train/loss": 1.5})
    log.record(30, {"train/loss": 1.0})
    log.close()
    rows = read_history(tmp_path)
    assert [row["step"] for row in rows] == ([10] if before else []) + [20, 30] and rows[-2]["train/loss"] == 1.5


def test_other_lists_are_mended_too(tmp_path):
    path = tmp_path / INCIDENTS
    path.write_bytes(b'{"at": 1, "attempt": 1}\n{"at": 2, "att')
    append_lines(path, [json.dumps({"at": 3, "attempt": 3})])
    assert [one["at"] for one in read_incidents(tmp_path)] == [1, 3]
    (tmp_path / "rollbacks.jsonl").write_bytes(b"\xff half")
    append_rollback_log(tmp_path, [])
    assert (tmp_path / "rollbacks.jsonl").read_bytes() == b""
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError):
        append_lines(tmp_path / "link", ["through"])


def test_runs_that_share_a_table_lose_no_row(tmp_path):
    def trains(name, count, new_columns):
        tracker = CsvTracker(path=str(tmp_path / "all.csv"))
        tracker.about(RunFacts(name, name, str(tmp_path), {}))
        tracker.begin(0, count, None)
        for step in range(1, count + 1):
            more = {f"evaluation/{name}": 1.0} if new_columns and step % 5 == 0 else {}
            tracker.record(step, {"train/loss": 1.0 / step, **more})

    runs = [("long", 150, False), *((f"short{n}", 10, True) for n in range(4))]
    threads = [threading.Thread(target=trains, args=run) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with open(tmp_path / "all.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {name: sum(row["run"] == name for row in rows) for name, *_ in runs} == {
        name: count for name, count, _ in runs
    }
    assert all(row["train/loss"] == repr(1.0 / int(row["step"])) for row in rows)
    assert sum(row["evaluation/short2"] == "1.0" for row in rows) == 2


def test_what_waits_for_a_place_that_blocks_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr("panax.metrics.background.MAX_PENDING_BYTES", 1_000_000)
    warned: list[str] = []
    go, got = threading.Event(), []
    lane = BackgroundReporter("a service", warned.append)
    lane.put(go.wait, 60)
    for number in range(100):
        lane.put(lambda step, picture: got.append(step), number, np.zeros((200, 200, 3), np.uint8))
    lane.put(lambda text: got.append(len(text)), "x" * 2_000_000)
    held = sum(size for _, _, size in lane._calls)
    assert held <= 1_000_000 and len(warned) == 1 and "is falling behind" in warned[0]
    go.set()
    lane.close()
    assert got == list(range(len(got))) and 8 <= len(got) < 100
    # Alone, one that is larger than all that may wait is reported.
    lane = BackgroundReporter("a service", warned.append)
    lane.put(lambda text: got.append(len(text)), "x" * 2_000_000)
    lane.close()
    assert got[-1] == 2_000_000
