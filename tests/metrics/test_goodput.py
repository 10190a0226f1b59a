"""A run's seconds: each is booked once, whatever became of its sessions."""

import itertools
import json
import threading
import time
from pathlib import Path

import pytest

from panax.metrics import ledger as ledgers
from panax.metrics.energy import EnergyMeter, _package_meter
from panax.metrics.goodput import FILE, KINDS, Interval, read_intervals, read_life, summarize_life
from panax.metrics.ledger import Ledger


class Clock:
    """Both clocks of `time`, by hand."""

    def __init__(self, monkeypatch):
        self.now, self.ahead = 1000.0, 0.0
        monkeypatch.setattr(ledgers.time, "time", lambda: self.now + self.ahead)
        monkeypatch.setattr(ledgers.time, "monotonic", lambda: self.now - 900.0)

    def __call__(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def nonzero(seconds) -> dict[str, float]:
    return {kind: round(value, 3) for kind, value in seconds.items() if round(value, 3)}


def session(
    folder: Path, clock: Clock, begins: int, steps: int, *, word: str = "", attempt: int = 1, saves=(), goes_on=False
) -> Ledger:
    """2 s of starting, 1 s a step; without a word it dies a moment after its last writing."""
    ledger = Ledger(folder, clock.now, attempt=attempt, goes_on=goes_on)
    clock(2.0)
    ledger.begin_steps(begins)
    for step in range(begins + 1, begins + steps + 1):
        clock(1.0)
        ledger.record_step(step)
        if step in saves:
            with ledger.measure("checkpoint wait"):
                clock(0.5)
            ledger.record_step(step, saved=True)
    if word:
        ledger.close(word)
    return ledger


def test_seconds_go_where_they_were_spent_and_add_up(tmp_path, clock):
    ledger = session(tmp_path, clock, 0, 12, saves=(4, 8))
    with ledger.measure("evaluation"):
        clock(3.0)
        ledger.reassign(1.0, "compile")
        with ledger.measure("checkpoint wait"):
            clock(0.25)
    ledger.close("done")
    life = read_life(tmp_path)
    assert nonzero(life.seconds) == {
        "training": 12.0, "start": 2.0, "compile": 1.0, "evaluation": 2.0, "checkpoint wait": 1.25,
    }  # fmt: skip
    assert life.wall_seconds == pytest.approx(18.25) == sum(life.seconds.values())
    assert life.goodput == pytest.approx(12 / 18.25)
    (only,) = life.sessions
    assert (only.first_step, only.last_step, only.end, only.failed) == (0, 12, "done", False)
    ends = [(begin, end) for _, begin, end in life.spans]
    assert ends[0][0] == 1000.0 and ends[-1][1] == pytest.approx(1018.25)
    assert all(before[1] == pytest.approx(after[0]) for before, after in itertools.pairwise(ends))
    scalars = ledger.scalars()
    assert scalars["goodput/training_seconds"] == 12.0 and scalars["goodput/checkpoint_wait_seconds"] == 1.25


def test_steps_taken_again_are_lost_work_and_the_way_back_is_restart(tmp_path, clock):
    session(tmp_path, clock, 0, 25, saves=(10, 20))
    clock(4.0)
    ledger = session(tmp_path, clock, 20, 10, word="done", attempt=2)
    life = read_life(tmp_path)
    assert nonzero(life.seconds) == {
        "training": 30.0, "start": 2.0, "checkpoint wait": 1.0, "lost work": 5.0, "restart": 6.0,
    }  # fmt: skip
    assert sum(life.seconds.values()) == pytest.approx(life.wall_seconds)
    first, second = life.sessions
    assert (first.lost_steps, round(first.lost_seconds, 3), round(first.restart_seconds, 3)) == (5, 5.0, 6.0)
    assert first.failed and not second.failed and second.lost_steps == 0
    # What the run's log is told as it goes is what is read afterwards.
    assert ledger.scalars()["goodput/lost_work_seconds"] == pytest.approx(5.0)
    assert ledger.scalars()["goodput/restart_seconds"] == pytest.approx(6.0)


def test_steps_inside_of_an_interval_count_as_equally_long(tmp_path, clock):
    # Intervals of ten steps, and the session goes on in the middle of one.
    session(tmp_path, clock, 0, 30)
    session(tmp_path, clock, 15, 5, word="done", attempt=2)
    assert read_life(tmp_path).seconds["lost work"] == pytest.approx(15.0)


def test_a_session_that_goes_back_further_loses_what_several_have_done(tmp_path, clock):
    session(tmp_path, clock, 0, 20, saves=(10, 20))
    session(tmp_path, clock, 20, 5, attempt=2)
    session(tmp_path, clock, 10, 2, word="done", attempt=3)
    life = read_life(tmp_path)
    assert [each.lost_steps for each in life.sessions] == [10, 5, 0]
    assert life.seconds["lost work"] == pytest.approx(10 + 0.5 + 5)
    assert life.seconds["training"] == pytest.approx(12)


@pytest.mark.parametrize(
    ("word", "attempt", "gap", "start"),
    [
        ("stopped by SIGTERM", 1, "idle", "start"),
        # Nobody was at it until somebody gave the command again.
        ("", 1, "idle", "restart"),
        ("error: OSError: gone", 1, "idle", "restart"),
        ("", 2, "restart", "restart"),
        # The supervisor's second start, after a stop that was asked for in an earlier job.
        ("stopped by SIGTERM", 2, "idle", "start"),
    ],
)
def test_the_time_between_sessions(tmp_path, clock, word, attempt, gap, start):
    session(tmp_path, clock, 0, 4, word=word, saves=(4,))
    clock(100.0)
    session(tmp_path, clock, 4, 4, word="done", attempt=attempt)
    seconds = dict.fromkeys(KINDS, 0.0) | {"training": 8.0, "checkpoint wait": 0.5, "start": 2.0}
    for kind, value in ((gap, 100.0), (start, 2.0)):
        seconds[kind] += value
    assert nonzero(read_life(tmp_path).seconds) == nonzero(seconds)


def test_a_change_of_layout_is_no_idle_time(tmp_path, clock):
    """The supervisor has all processes save and end, and starts them again on other nodes."""
    session(tmp_path, clock, 0, 4, word="stopped by SIGTERM", saves=(4,))
    clock(6.0)
    session(tmp_path, clock, 4, 4, word="done", attempt=2, goes_on=True)
    life = read_life(tmp_path)
    assert life.seconds["restart"] == pytest.approx(6.0 + 2.0) and life.seconds["idle"] == 0
    assert life.sessions[0].restart_seconds == pytest.approx(8.0) and life.sessions[0].idle_seconds == 0
    assert life.seconds["lost work"] == 0


def test_a_killed_process_leaves_all_but_its_last_second(tmp_path, clock):
    ledger = session(tmp_path, clock, 0, 3)
    # Steps alone, with nothing between them, are written too.
    assert (read_life(tmp_path).wall_seconds, read_life(tmp_path).sessions[0].last_step) == (5.0, 3)
    clock(5.0)
    ledger.switch("evaluation")
    clock(0.5)
    ledger.switch("training")
    # Half a second after the last writing: not told.
    assert read_life(tmp_path).wall_seconds == pytest.approx(10.0)
    assert len(Path(tmp_path, FILE).read_text().splitlines()) == 2


def test_an_interval_that_continues_is_written_over(tmp_path, clock):
    ledger = Ledger(tmp_path, clock.now)
    for _ in range(50):
        clock(1.0)
        ledger.switch("start")
    assert len((tmp_path / FILE).read_text().splitlines()) == 1
    ledger.begin_steps(7)
    ledger.close("done")
    assert nonzero(read_life(tmp_path).seconds) == {"start": 50.0}


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_line_cut_short_is_left_out_and_the_next_session_begins_a_line(tmp_path, clock, cut):
    session(tmp_path, clock, 0, 25)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-cut])
    before = read_life(tmp_path)
    clock(3.0)
    session(tmp_path, clock, 10, 5, word="done", attempt=2)
    life = read_life(tmp_path)
    assert life.sessions[-1].number == 2 and len(life.sessions) == 2
    assert life.sessions[0].ended == before.sessions[0].ended
    assert sum(life.seconds.values()) == pytest.approx(life.wall_seconds)


def test_what_is_no_line_of_the_ledger_is_left_out(tmp_path, clock):
    session(tmp_path, clock, 0, 12, word="done")
    path, good = tmp_path / FILE, read_life(tmp_path)
    strangers = [
        "", "{", "[]", "null", '{"session": 1}', '{"session": "x", "from": 1, "to": 2, "step": 0, "seconds": {}}',
        '{"session": 9, "from": 5000, "to": 4000, "step": 0, "seconds": {}}',
        '{"session": 9, "from": 5000, "to": 5001, "step": 0, "seconds": {"sleeping": 1}}',
        '{"session": 9, "from": 5000, "to": 5001, "step": 0, "seconds": {"training": NaN}}',
        '{"session": 0, "from": 5000, "to": 5001, "step": 0, "seconds": {"training": 1}}',
        "[" * 100_000,
    ]  # fmt: skip
    path.write_bytes(path.read_bytes() + "\n".join(strangers).encode() + b"\n\xff\xfe\n")
    assert read_life(tmp_path) == good


def test_clocks_that_disagree_do_not_make_sessions_overlap(tmp_path, clock):
    clock.ahead = 3600.0
    ahead = Ledger(tmp_path, 1000.0 + 3600.0)
    clock(10.0)
    ahead.begin_steps(0)
    ahead.close("stopped by SIGTERM")
    clock.ahead = 0.0
    session(tmp_path, clock, 0, 4, word="done")
    life = read_life(tmp_path)
    assert nonzero(life.seconds) == {"start": 12.0, "training": 4.0}
    assert life.wall_seconds == pytest.approx(16.0)


def test_a_wait_for_data_counts_from_when_the_devices_were_done(tmp_path, clock):
    ledger = session(tmp_path, clock, 0, 1)
    busy, waited = threading.Event(), threading.Event()

    def finished():
        busy.wait(10)

    def done() -> None:
        busy.set()
        deadline = time.perf_counter() + 10
        while any(thread.name == "panax-devices" for thread in threading.enumerate()):
            assert time.perf_counter() < deadline
            waited.wait(0.001)

    with ledger.measure_data_wait(finished):
        clock(3.0)
        done()
        clock(0.75)
    assert ledger.scalars()["goodput/data_wait_seconds"] == 0.75
    busy.clear()
    with ledger.measure_data_wait(finished):
        clock(9.0)
    # The devices were busy all the time.
    assert ledger.scalars()["goodput/data_wait_seconds"] == 0.75
    busy.set()


def test_other_processes_book_and_write_nothing(tmp_path, clock):
    ledger = Ledger(None, clock.now)
    ledger.begin_steps(0)
    clock(20.0)
    ledger.record_step(3)
    ledger.close("done")
    assert list(tmp_path.iterdir()) == [] and ledger.scalars()["goodput/training_seconds"] == 20.0


def test_energy_is_that_of_each_interval(tmp_path, clock):
    meter = EnergyMeter(lambda: 100.0 * clock.now, "a test's devices")
    ledger = Ledger(tmp_path, clock.now, energy=meter)
    clock(3.0)
    ledger.begin_steps(0)
    clock(12.0)
    ledger.record_step(5)
    ledger.close("done")
    (only,) = read_life(tmp_path).sessions
    assert (only.joules, only.joules_of) == (1500.0, "a test's devices")


def test_counters_package_meter_continue_beyond_their_range(tmp_path):
    for name, label, current in (
        ("intel-rapl:0", "package-0", 900),
        ("intel-rapl:0:0", "core", 5),
        ("intel-rapl:1", "psys", 7),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(f"{label}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("1000000\n")
        (tmp_path / name / "energy_uj").write_text(f"{current}000\n")
    meter = _package_meter(tmp_path)
    assert meter is not None
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("100000\n")
    assert meter.take()["joules"] == pytest.approx(0.2)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert meter.take() == {}
    assert _package_meter(tmp_path / "none") is None


def test_the_lines_of_one_session_are_those_of_one_writer(tmp_path, clock):
    session(tmp_path, clock, 0, 35, word="done")
    lines = read_intervals(tmp_path)
    assert [type(line) for line in lines] == [Interval] * 5
    for line, text in zip(lines, (tmp_path / FILE).read_text().splitlines(), strict=True):
        assert sum(line.seconds.values()) == pytest.approx(line.end - line.begin, abs=1e-3)
        assert json.loads(text)["session"] == 1
    assert summarize_life(lines[:3]).sessions[0].failed
