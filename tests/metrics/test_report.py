"""`panax report`: every incident with its cause and cost, from whole folders, poor ones and spoilt ones."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from reported import BEGAN, interval, session, write_failed_twice, write_lines, write_metrics
from test_page import Balanced

import panax
from panax.cli.main import main
from panax.core.errors import DataError, RecipeError
from panax.metrics.report.costs import compute_device_hours
from panax.metrics.report.curves import read_curves
from panax.metrics.report.figures import compute_figures, run_status
from panax.metrics.report.run_files import RUN_MARKER_FILES, read_run
from panax.system.lock import open_locked


@pytest.fixture
def failed_twice(tmp_path) -> Path:
    write_failed_twice(tmp_path / "tiny")
    return tmp_path / "tiny"


def aged(folder: Path) -> Path:
    """As if nobody had written there for long."""
    for path in folder.rglob("*"):
        os.utime(path, (BEGAN, BEGAN))
    return folder


def text_of(page: Path) -> str:
    """The visible text, without pictures."""
    body = page.read_text(encoding="utf-8").partition("<body>")[2].partition("<script>")[0]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<svg.*?</svg>", "", body, flags=re.S)))


def test_every_incident_is_there_with_its_cause_and_cost(failed_twice):
    figures = compute_figures(read_run(failed_twice))
    assert [mishap.cause for mishap in figures.mishaps] == ["lost host", "no message"]
    lost, died = figures.mishaps
    # 5 s of lost work on 4 devices, then 10 s of restarting, which the next session counts, on 2.
    assert (lost.lost_steps, lost.lost_seconds, lost.restart_seconds) == (5, 5.0, 10.0)
    assert lost.device_hours == pytest.approx((5 * 4 + 10 * 2) / 3600)
    # 5 s of lost work and a gap of 10 s on 2 devices, then half a second on 4.
    assert died.step == 30 and died.device_hours == pytest.approx((5 * 2 + 10 * 2 + 0.5 * 4) / 3600)
    page = panax.report(failed_twice, rate=3600.0, currency="EUR")
    text = text_of(page)
    assert page == failed_twice / "report.html"
    for said in (
        "Incident 1 at step 20: lost host", "host b &lt;is&gt; gone", "0.0111 device-hours, 40.00 EUR",
        "detection 1 s, teardown 2 s, restart 3 s, restore 4 s, first step 5 s",
        "Incident 2 at step 30: no message", "0.00889 device-hours, 32.00 EUR", "The process ended without a message",
    ):  # fmt: skip
        assert said in text, said
    shape = Balanced(page.read_text(encoding="utf-8"))
    assert shape.fetched == [] and shape.tags.count("script") == 1
    assert {"#incident-0-1", "#incident-0-2"} == set(shape.links) and {"incident-0-1", "incident-0-2"} <= set(shape.ids)


def test_failures_before_the_run_had_begun_its_ledger_have_a_cost_too(tmp_path):
    """Killed after 2 s and after 6 s of importing, at 30 s after steps, and at 34 s while it restarted; in seconds."""
    ledger = [
        interval(1, 10, 20, 0, "start"),
        interval(1, 20, 30, 10),
        interval(2, 36, 40, 5, "restart", gap="restart"),
        interval(2, 40, 60, 40, end="done"),
    ]
    write_metrics(tmp_path)
    write_lines(tmp_path / "goodput.jsonl", ledger)
    write_lines(tmp_path / "sessions.jsonl", [session(2, 36)])
    killed = {"cause": "killed", "message": "process 0 on a was killed by SIGKILL", "process": 0, "tail": []}
    failures = enumerate(((2, -1), (6, -1), (30, 10), (34, -1)), start=1)
    incidents = [{"attempt": attempt, "at": BEGAN + at, "step": step, **killed} for attempt, (at, step) in failures]
    write_lines(tmp_path / "job/incidents.jsonl", incidents)
    figures = compute_figures(read_run(tmp_path)).mishaps
    assert [mishap.restart_seconds for mishap in figures] == pytest.approx([18.0, 14.0, 10.0, 6.0])
    assert [mishap.lost_steps for mishap in figures] == [0, 0, 5, 0]
    # What two of them waited for is booked once: 4 s, 14 s, 5 s of lost work and 4 s, 6 s.
    assert [mishap.device_hours * 3600 / 4 for mishap in figures] == pytest.approx([4.0, 14.0, 9.0, 6.0])


def test_the_top_shows_the_main_figures(failed_twice):
    text = text_of(panax.report(failed_twice, rate=3600.0))
    hours = (10 + 15 + 5) * 4 + (10 + 15 + 10) * 2 + 15 * 4
    for said in (
        "State done step 40 of 40", "0.1375 held out; training 0.1250", "tokens/s, median; MFU 40.0 %",
        "Time 1 min 20 s in 3 sessions", f"{hours:,}.00 USD", "Incidents 2 lost host, no message",
        "1 kWh, of 4 GPUs", "abc123", "with changes that were not committed", "12,345",
        "optimizer.schedule.peak 0.003", "fsdp 2", "params.w embed -&gt; fsdp",
    ):  # fmt: skip
        assert said in text, said
    assert compute_device_hours(read_run(failed_twice)).total == pytest.approx(hours / 3600)


def test_steps_that_were_taken_again_count_as_they_went_the_last_time(tmp_path):
    rows = [{"step": step, "train/loss": 1.0} for step in (1, 2, 3, 4)]
    again = [{"step": 3, "train/loss": 9.0}, {"step": 3, "evaluation/loss": 8.0}, {"step": 5, "train/loss": None}]
    write_lines(tmp_path / "log", [*rows, *again], "no json\n[1]\n{}\n" + '{"step": 6, "train/loss": 7.0')
    curves, unread = read_curves(tmp_path / "log")
    assert list(curves["train/loss"].x) == [1, 2, 3, 5] and curves["train/loss"].last == 9.0
    assert list(curves["evaluation/loss"].x) == [3] and unread == 3


def test_times_of_steps_are_those_of_the_last_session_that_took_them(failed_twice):
    times = read_run(failed_twice).times
    assert times.measured
    assert times.at([0, 15, 20, 25, 40]).tolist() == pytest.approx([10, 40, 45, 65.5, 80])


@pytest.mark.parametrize("kept", [(name,) for name in RUN_MARKER_FILES] + [(), ("goodput.jsonl", "metrics.jsonl")])
def test_a_poor_folder_states_what_is_missing(failed_twice, kept, tmp_path):
    poor = tmp_path / "poor"
    for name in kept:
        (poor / name).parent.mkdir(parents=True, exist_ok=True)
        (poor / name).write_bytes((failed_twice / name).read_bytes())
    if not kept:
        poor.mkdir()
        with pytest.raises(DataError, match="is not a run's folder: it has none of"):
            panax.report(poor)
        return
    text = text_of(panax.report(poor))
    lacking = {"metrics.jsonl": "There are no curves", "goodput.jsonl": "Where the time went is unknown"}
    lacking["sessions.jsonl"] = "The layout is unknown"
    for name, said in lacking.items():
        assert (said in text) == (name not in kept), (name, said)


def test_states(tmp_path):
    def state(*lines, fresh=False, held=False, **status):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        write_metrics(folder, 3)
        if lines:
            write_lines(folder / "goodput.jsonl", lines)
        if status:
            write_lines(folder / "job/status.json", [status])
        with open_locked(folder / ".lock") if held else contextlib.nullcontext():
            return run_status(read_run(folder if fresh else aged(folder))).word

    going = interval(1, 0, 5, 3)
    assert state() == "unknown" and state(fresh=True) == "running" and state(held=True) == "running"
    assert state(going) == "died" and state(going, fresh=True) == "running" and state(going, held=True) == "running"
    assert state(going | {"end": "done"}) == "done"
    assert state(going | {"end": "stopped by SIGTERM"}) == "stopped"
    assert state(going | {"end": "error: DataError: x"}) == "failed"
    assert state(end={"exit_code": 0, "message": "done"}) == "done"
    assert state(end={"exit_code": 143, "message": "stopped by SIGTERM"}) == "stopped"
    assert state(going, end={"exit_code": 6, "message": "given up"}) == "failed" and state(step=3) == "died"
    assert state(going | {"end": "error: x"}, at=time.time()) == "running", "a supervisor starts it again"


def test_a_run_that_was_killed_on_this_host_is_dead_at_once(tmp_path):
    write_lines(tmp_path / "goodput.jsonl", [interval(1, 0, 5, 3)])
    write_lines(tmp_path / "sessions.jsonl", [session(1, 0, hosts=[socket.gethostname()])])
    with open_locked(tmp_path / ".lock"):
        assert compute_figures(read_run(tmp_path)).mishaps == []
    found = compute_figures(read_run(tmp_path))
    assert found.state.word == "died" and [mishap.cause for mishap in found.mishaps] == ["no message"]


def test_an_error_that_no_supervisor_saw_is_an_incident_and_a_stop_is_not(tmp_path):
    write_lines(tmp_path / "goodput.jsonl", [interval(1, 0, 5, 3, end="error: DataError: x is y")])
    assert [(m.cause, m.message) for m in compute_figures(read_run(tmp_path)).mishaps] == [
        ("error", "DataError: x is y")
    ]
    write_lines(tmp_path / "goodput.jsonl", [interval(1, 0, 5, 3, end="stopped by SIGTERM")])
    assert compute_figures(read_run(tmp_path)).mishaps == []


def test_several_runs_side_by_side(failed_twice, tmp_path):
    other, poor = tmp_path / "other", tmp_path / "poor"
    write_metrics(other, 20)
    write_lines(other / "goodput.jsonl", [interval(1, 0, 20, 20, end="done")])
    changed = {"settings": {"type": "Experiment", "seed": 6}, "versions": {"panax": "0.1.1", "jax": "0.12.0"}}
    write_lines(other / "sessions.jsonl", [session(1, 0, 8, **changed)])
    write_metrics(poor, 30)
    page = panax.report(failed_twice, other, poor, rate=1.0, output=tmp_path / "all.html")
    text = text_of(page)
    for said in (
        "seed 5 6", "jax 0.10.2 0.12.0", "tiny: incident 1", "by step by time", "devices 4 x H100 8 x H100",
        "Unknown without sessions.jsonl: poor", "since goodput.jsonl is missing: poor",
    ):  # fmt: skip
        assert said in text, said
    shape = Balanced(page.read_text(encoding="utf-8"))
    assert len(shape.ids) == len(set(shape.ids)) and {link[1:] for link in shape.links} <= set(shape.ids)


def test_runs_of_one_name_are_distinguished(failed_twice, tmp_path):
    write_failed_twice(tmp_path / "again")
    text = text_of(panax.report(failed_twice, tmp_path / "again"))
    assert "tiny · again" in text and (failed_twice / "comparison.html").is_file()


SPOILT = [None, True, 0, -1, 1e400, 10**400, "x", "<b>", [], [1], {}, {"a": {"b": [None]}}, "\ud800"]


@pytest.mark.parametrize("value", SPOILT, ids=lambda value: f"{value!a:.12}")
def test_whatever_values_hold_a_page_comes_of_it(failed_twice, value):
    for name in ("sessions.jsonl", "job/incidents.jsonl", "job/job.json", "metrics.jsonl"):
        rows = [json.loads(line) for line in (failed_twice / name).read_text().splitlines() if line.endswith("}")]
        row = rows[-1]
        for key in row:
            if key != "step" or name != "metrics.jsonl":
                row[key] = value
        write_lines(failed_twice / name, rows)
    write_lines(failed_twice / "job/status.json", [{"end": value, "seconds": value, "step": value, "num_steps": value}])
    write_lines(failed_twice / "data_account.json", [{"step": value, "parts": {"x": value, "y": {"epochs": value}}}])
    page = panax.report(failed_twice, rate=2.0)
    assert Balanced(page.read_text(encoding="utf-8")).tags.count("script") <= 1


@pytest.mark.parametrize("content", [b"", b"\x00\xff\n", b"{" * 5000 + b"\n", b"[]\n" * 3, b'{"step": 1'])
def test_files_of_something_else(tmp_path, content):
    for name in ("metrics.jsonl", "sessions.jsonl", "job/job.json", "job/status.json", "job/incidents.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    Balanced(panax.report(tmp_path).read_text(encoding="utf-8"))


def test_mistakes_are_one_message(failed_twice, tmp_path, capsys):
    with pytest.raises(RecipeError, match="got none"):
        panax.report()
    with pytest.raises(RecipeError, match="given twice"):
        panax.report(failed_twice, failed_twice / ".." / "tiny")
    for rate in (-1.0, float("nan"), float("inf")):
        with pytest.raises(RecipeError, match="price of a device-hour"):
            panax.report(failed_twice, rate=rate)
    with pytest.raises(RecipeError, match="currency"):
        panax.report(failed_twice, currency=" ")
    with pytest.raises(DataError, match=f"no such folder; there are {tmp_path / 'tiny'}"):
        panax.report(tmp_path / "tyni")
    with pytest.raises(DataError, match="is a folder"):
        panax.report(failed_twice, output=tmp_path)
    with pytest.raises(DataError, match="can't write the page"):
        panax.report(failed_twice, output=tmp_path / "absent" / "x.html")
    assert main(["report", str(tmp_path)]) == 3
    assert f"there are {tmp_path / 'tiny'}" in capsys.readouterr().err


def test_the_command_needs_no_jax_and_states_where_the_page_is(failed_twice, tmp_path):
    program = "import sys; from panax.cli.main import main; main(sys.argv[1:]); assert 'jax' not in sys.modules"
    place = tmp_path / "page.html"
    command = [sys.executable, "-c", program, "report", str(failed_twice), "--rate", "2", "--output", str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.strip() == str(place), done.stderr
    assert "2 USD" in place.read_text(encoding="utf-8")


def test_a_long_run_gives_a_small_page(tmp_path):
    rows = (
        {"step": step, **{f"train/{name}": step % 97 * 1.2345678 for name in "abcdefgh"}} for step in range(1, 20_001)
    )
    write_lines(tmp_path / "metrics.jsonl", list(rows))
    assert panax.report(tmp_path).stat().st_size < 300_000
