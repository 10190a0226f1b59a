"""`panax simulate`: stage times read from a run's files, what is missing, the terminal, the page, mistakes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from reported import interval, session, write_failed_twice, write_lines, write_metrics
from test_page import Balanced

import panax
from panax.cli.main import main
from panax.core.errors import DataError, RecipeError
from panax.plan.goodput.stage_times import read_stage_times

GIVEN = {
    "step": 10.0, "every": 60, "stall": 5.0, "detect": 30.0, "teardown": 10.0, "restart": 60.0, "restore": 60.0,
    "first_step": 90.0,
}  # fmt: skip
SETTINGS = {"settings": {"type": "Experiment", "checkpoint": {"every": 5, "memory": {"every": 0}}}}


def flags(**times) -> list[str]:
    return [word for name, value in times.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def failed_twice(tmp_path) -> Path:
    """As in `write_failed_twice`, with a checkpoint every 5 steps."""
    folder = tmp_path / "tiny"
    write_failed_twice(folder)
    write_lines(folder / "sessions.jsonl", [session(1, 0, **SETTINGS), session(2, 35, 2), session(3, 65, **SETTINGS)])
    return folder


def test_stage_times_are_those_of_the_run(failed_twice):
    stage_times = read_stage_times(failed_twice)
    # 15 steps of the first session count, 10 of the second, 15 of the third.
    assert stage_times.times["step"] == pytest.approx((15 + 10 + 14.5) / 40)
    phases = {"detect": 1.0, "teardown": 2.0, "restart": 3.0, "restore": 4.0, "first_step": 5.0}
    assert {name: stage_times.times[name] for name in phases} == phases
    assert (
        stage_times.times["every"] == 5
        and stage_times.times["measured_devices"] == 4
        and stage_times.times["stall"] == 0
    )
    assert stage_times.sources["restore"] == "job/incidents.jsonl, mean of 1"
    result = panax.simulate(failed_twice, devices=16384, stall=0.5, lives=2)
    assert result.stages.restore == 4.0 and result.sources["stall"] == "given" and result.now.every == 5
    assert any("on 16,384 devices as on the 4 that were measured" in said for said in result.assumptions)


def test_a_stall_is_the_mean_wait_of_a_save(failed_twice):
    ledger = [json.loads(line) for line in (failed_twice / "goodput.jsonl").read_text().splitlines()]
    ledger[1]["seconds"] = {"training": 12.0, "checkpoint wait": 3.0}
    write_lines(failed_twice / "goodput.jsonl", ledger)
    found = read_stage_times(failed_twice)
    assert (
        found.times["stall"] == pytest.approx(3.0 / 8) and found.sources["stall"] == "goodput.jsonl, mean over 8 saves"
    )


def test_without_a_supervisor_a_recovery_is_one_figure(failed_twice):
    (failed_twice / "job/incidents.jsonl").unlink()
    found = read_stage_times(failed_twice)
    # 10 s and 10.5 s from a failure to the next step.
    assert found.times["restart"] == pytest.approx(10.25) and found.times["detect"] == 0
    assert "all of it is counted as restart" in found.notes[0]


def test_of_a_run_that_never_failed_recovery_is_assumed_and_reported_to_be(tmp_path):
    write_metrics(tmp_path, 10)
    write_lines(tmp_path / "goodput.jsonl", [interval(1, 0, 1, 0, "start"), interval(1, 1, 11, 10, end="done")])
    write_lines(tmp_path / "sessions.jsonl", [session(1, 0, **SETTINGS)])
    simulation = panax.simulate(tmp_path, devices=64, lives=2, detect=7.0)
    assert (simulation.stages.detect, simulation.stages.teardown, simulation.stages.restore) == (7.0, 10.0, 60.0)
    assert simulation.sources["detect"] == "given" and simulation.sources["restore"] == "assumed"
    assert any("--teardown, --restart, --restore, --first-step are assumed" in said for said in simulation.assumptions)
    recovery = {name: GIVEN[name] for name in ("detect", "teardown", "restart", "restore", "first_step")}
    told = panax.simulate(tmp_path, devices=64, lives=2, **recovery, stall=1.0)
    assert told.stages.step == pytest.approx(1.0) and not any("are assumed; give" in said for said in told.assumptions)


def test_a_run_of_metrics_alone_reports_its_step(tmp_path):
    write_metrics(tmp_path, 10)
    found = read_stage_times(tmp_path)
    assert {name: value for name, value in found.times.items() if found.sources[name] != "assumed"} == {"step": 0.5}


def test_a_run_without_steps_is_refused(tmp_path):
    write_lines(tmp_path / "goodput.jsonl", [interval(1, 0, 10, None, "start", end="error: x")])
    with pytest.raises(DataError, match="has no step"):
        panax.simulate(tmp_path, devices=64)
    with pytest.raises(DataError, match="no such folder"):
        panax.simulate(tmp_path / "absent", devices=64)


@pytest.mark.parametrize("value", [None, -1, 1e400, "x", {"every": "x"}], ids=str)
def test_whatever_values_the_files_hold_is_taken_or_left_out(failed_twice, value):
    for name in ("sessions.jsonl", "job/incidents.jsonl"):
        rows = [json.loads(line) for line in (failed_twice / name).read_text().splitlines()]
        rows[-1] |= {key: value for key in ("settings", "devices", "detect", "restart", "restore") if key in rows[-1]}
        write_lines(failed_twice / name, rows)
    result = dict(read_stage_times(failed_twice).times)
    times = {name: seconds for name, seconds in GIVEN.items() if not result.get(name, -1) >= 0}
    if value == -1:
        with pytest.raises(RecipeError, match="detect=-1: expected a number from 0"):
            panax.simulate(failed_twice, devices=64, **{"every": 5, "stall": 1.0})
        return
    assert panax.simulate(failed_twice, devices=64, lives=2, **times).now.goodput > 0.5


def test_mistakes_are_one_message(tmp_path, capsys):
    for inputs, said in (
        ({"stal": 1.0}, "unknown stage time 'stal'; did you mean 'stall'"),
        ({"lives": 1}, "lives=1: expected a whole number from 2"),
        ({"days": 0.001}, "a checkpoint comes after 0.007 days"),
        ({"step": 0.0}, "step=0: expected a number above 0"),
    ):
        with pytest.raises(RecipeError, match=said):
            panax.simulate(devices=64, **{**GIVEN, **inputs})
    with pytest.raises(RecipeError, match="expected these stage times: step, every, stall"):
        panax.simulate(devices=64)
    with pytest.raises(DataError, match="is a folder"):
        panax.simulate(devices=64, lives=2, output=tmp_path, **GIVEN)
    with pytest.raises(DataError, match="can't write the page"):
        panax.simulate(devices=64, lives=2, output=tmp_path / "absent" / "x.html", **GIVEN)
    assert main(["simulate", "--devices", "12", *flags(**GIVEN)]) == 2
    assert "use 8 or 16 devices, or set --devices-per-host" in capsys.readouterr().err


def test_the_terminal_has_the_answer_in_80_columns(capsys):
    assert main(["simulate", "--devices", "16384", "--lives", "2", *flags(**GIVEN)]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    for line in ("goodput         94.4 %", "best            every 33 steps (5 min 30 s), goodput 94.9 %", "131,072"):
        assert line in said
    words = re.sub(r"\s+", " ", said)
    assert "Save every 33 steps (5 min 30 s) in place of every 60 steps" in words
    assert "Restart is assumed not to grow" in words


def test_a_run_that_never_advances_is_reported(capsys):
    assert main(["simulate", "--devices", "131072", "--lives", "2", *flags(**GIVEN, failures_per_device_day=100)]) == 0
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "0.0 %: the run never advances" in said and "no interval lets the run advance" in said


def test_the_page_is_whole_and_the_command_needs_no_jax(failed_twice, tmp_path):
    place = tmp_path / "page.html"
    program = "import sys; from panax.cli.main import main; main(sys.argv[1:]); assert 'jax' not in sys.modules"
    command = [
        sys.executable, "-c", program, "simulate", str(failed_twice), "--devices", "1024", "--stall", "1", "--json",
        "--lives", "2", "--output", str(place),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["stages"]["restart"] == 3.0 and result["by_devices"][-1]["now"]["devices"] == 131072
    assert sum(result["now"]["shares"].values()) == pytest.approx(1)
    shape = Balanced(place.read_text(encoding="utf-8"))
    assert shape.fetched == [] and shape.tags.count("figure") == 3
