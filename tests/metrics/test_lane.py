"""A tracker can neither delay nor end the run that it reports on."""

import json
import os
import re
import struct
import threading
import time

import pytest
from tensorboardX.proto import event_pb2

from panax.metrics import BackgroundReporter, JsonlTracker, TensorBoardTracker, Tracker, Trackers


def test_a_place_that_blocks_holds_nothing_up():
    free, said = threading.Event(), []
    lane = BackgroundReporter("tape", said.append, max_waiting=3, close_seconds=0.1)
    started = time.monotonic()
    for _ in range(1000):
        lane.put(free.wait)
    lane.close()
    assert time.monotonic() - started < 5
    assert said[0] == "warning: tape is falling behind: some reports are dropped; training continues"
    assert said[1].startswith("warning: tape does not answer: ") and len(said) == 2
    free.set()


def test_a_failure_is_one_warning_and_what_follows_is_written():
    said, recorded, broken = [], [], [True]

    def keep(value):
        if broken:
            raise OSError(28, "No space left on device", "metrics.jsonl")
        recorded.append(value)

    lane = BackgroundReporter("metrics.jsonl", said.append)
    for number in range(5):
        lane.put(keep, number)
    while len(lane._calls):
        time.sleep(0.01)
    time.sleep(0.05)
    broken.clear()
    lane.put(keep, 5)
    lane.close()
    assert recorded == [5]
    assert len(said) == 1 and said[0].startswith(
        "warning: metrics.jsonl can't be written, and training continues without it: "
    )
    assert "No space left on device" in said[0]


def test_a_tracker_of_ones_own_that_raises_ends_nothing():
    class Broken(Tracker):
        def record(self, step, values):
            raise RuntimeError("no server")

    class Kept(Tracker):
        def __init__(self):
            self.steps = []

        def record(self, step, values):
            self.steps.append(step)

    said, recorded = [], Kept()
    lanes = [BackgroundReporter(name, said.append) for name in ("broken", "kept")]
    trackers = Trackers(zip((Broken(), recorded), lanes))
    for step in range(3):
        trackers.record(step, {"train/loss": 1.0})
    trackers.close()
    for lane in lanes:
        lane.close()
    assert recorded.steps == [0, 1, 2]
    assert said == ["warning: broken can't be written, and training continues without it: RuntimeError: no server"]


@pytest.fixture
def full(tmp_path):
    """A function that fills the disk, or frees it: a limit on the size of this process's files."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_leaves_whole_lines(tmp_path, full):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.record(1, {"train/loss": 1.0})
    full(os.path.getsize(tmp_path / "metrics.jsonl") + 10)
    with pytest.raises(OSError):
        tracker.record(2, {"train/loss": 2.0})
    full(None)
    tracker.record(3, {"train/loss": float("nan")})
    tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", line.pop("at")) for line in lines)
    assert lines == [{"step": 1, "train/loss": 1.0}, {"step": 3, "train/loss": None}]


def test_a_full_disk_under_tensorboard_loses_only_what_was_not_written(tmp_path, full, monkeypatch):
    tracker = TensorBoardTracker(tmp_path, purge_step=1)
    monkeypatch.setattr("panax.metrics.tensorboard.FLUSH_SECONDS", 0.0)
    tracker.record(1, {"train/loss": 1.0})
    full(max(file.stat().st_size for file in (tmp_path / "train").iterdir()) + 10)
    with pytest.raises(OSError):
        tracker.record(2, {"train/loss": 2.0})
    full(None)
    tracker.record(3, {"train/loss": 3.0})
    tracker.close()
    events = [event for file in (tmp_path / "train").iterdir() for event in events_in(file.read_bytes())]
    assert sorted((event.step, event.summary.value[0].simple_value) for event in events if event.summary.value) == [
        (1, 1.0), (3, 3.0),
    ]  # fmt: skip
    assert sum(event.HasField("session_log") for event in events) == 1


def events_in(data):
    """The whole records of an event file, as a reader takes them: up to the first that is cut short."""
    while len(data) >= 12 and len(data) >= 16 + (length := struct.unpack("<Q", data[:8])[0]):
        yield event_pb2.Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_several_places_that_do_not_answer_are_given_up_side_by_side(monkeypatch):
    never, warnings, waited = threading.Event(), [], []
    lanes = [BackgroundReporter(f"place {n}", warnings.append, close_seconds=30.0) for n in range(4)]
    for lane in lanes:
        lane.put(never.wait)
    monkeypatch.setattr(threading.Thread, "join", lambda self, seconds: (waited.append(seconds), time.sleep(0.01)))
    for lane in lanes:
        lane.end()
    for lane in lanes:
        lane.close()
    monkeypatch.undo()
    # The time that is left is less for each: it began for all of them at once.
    assert waited == sorted(waited, reverse=True) and waited[-1] <= waited[0] - 0.03 and len(warnings) == 4
    never.set()
