"""Sweeps: each combination in its own folder, one table, one chart; a failed run is a row; a second sweep trains nothing."""

import csv
import dataclasses
from pathlib import Path

import pytest

from panax import sweep
from panax.core import RecipeError, TrainingError
from panax.run.tools import sweep as sweeping
from panax.run.tools.sweep import Sweep, Trial, expand_flags, replace_setting


@pytest.fixture
def short(experiment):
    return dataclasses.replace(experiment, num_steps=4, log_every=2)


def test_a_sweep_ends_with_a_table_a_chart_and_the_best(short, monkeypatch):
    lines: list[str] = []
    peaks = {"optimizer.schedule.peak": (1e-5, 3e-2), "optimizer.schedule.warmup_steps": (1,)}
    outcome = sweep(short, peaks, say=lines.append)
    root = Path(f"{short.folder}-sweep")
    assert [trial.settings["optimizer.schedule.peak"] for trial in outcome.trials] == [1e-5, 3e-2]
    assert outcome.best is outcome.trials[1] and outcome.trials[1].loss < outcome.trials[0].loss - 0.05
    assert "run 2 of 2: peak 0.03, warmup_steps 1" in lines
    with open(root / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [trial.evaluation["loss"] for trial in outcome.trials]
    assert all(Path(row["folder"], "checkpoints", "step_00000004").is_dir() for row in rows)
    assert outcome.table["optimizer.schedule.peak"].tolist() == [1e-5, 3e-2]
    by_value, curves = ((root / name).read_text() for name in ("sweep.svg", "curves.svg"))
    assert by_value.count("<circle") == 2 and "optimizer.schedule.peak" in by_value and ">0.01<" in by_value
    assert curves.count("<circle") + curves.count("stroke-linejoin") >= 2 and "peak 0.03" in curves
    assert outcome.plot()._repr_svg_() == curves
    # Nothing is trained twice, and a run that fails is a row with its error.
    fit = sweeping.fit

    def failing(experiment, **settings):
        if experiment.optimizer.schedule.peak > 1:
            raise TrainingError("it diverged")
        return fit(experiment, **settings)

    monkeypatch.setattr(sweeping, "fit", failing)
    again = sweep(short, {**peaks, "optimizer.schedule.peak": (3e-2, 9.0)}, say=lines.append)
    assert any("all 4 steps are done" in line for line in lines)
    assert again.trials[0].evaluation == pytest.approx(outcome.trials[1].evaluation, rel=1e-6)
    assert again.trials[1].error == "it diverged" and again.best is again.trials[0]
    assert "it diverged" in (root / "sweep.csv").read_text()


def test_a_sweep_refuses_what_it_cannot_set(short):
    for settings, message in (
        ({"optimizer.schedule.paek": (1, 2)}, "Schedule has no setting 'paek': did you mean 'peak'"),
        ({"seed.x": (1, 2)}, "an int has no settings"),
        ({"seed": 3}, r"settings\['seed'\] is 3; expected several values"),
        ({"name": "ab"}, "expected several values"),
        ({"seed": (1, 1)}, "two runs of the sweep have the same settings"),
    ):
        with pytest.raises(RecipeError, match=message):
            sweep(short, settings, quiet=True)
    assert not Path(f"{short.folder}-sweep").exists()
    assert replace_setting(short, "task.model.embed", 16).task.model.embed == 16


def test_flags_with_commas_are_what_varies():
    runs = list(expand_flags(["--a.b-c=1,2", "--x", "3", "--y", "p,q", "--data", "f,g.txt", "--flag"]))
    assert len(runs) == 4 and runs[0][0] == {"a.b_c": "1", "y": "p"}
    assert runs[3][1] == ["--a.b-c", "2", "--x", "3", "--y", "q", "--data", "f,g.txt", "--flag"]


def test_a_result_draws_what_it_logged(undisturbed):
    result, _ = undisturbed
    svg = result.plot().svg
    assert "train/loss" in svg and "evaluation/loss" in svg and "seconds/step" not in svg
    assert "seconds/step" in result.plot("seconds/step").svg
    with pytest.raises(RecipeError, match="the run has logged no 'train/los': did you mean 'train/loss'"):
        result.plot("train/los")


def test_a_training_loss_is_not_compared_with_held_out_ones(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "train/loss": 0.0}\n')
    judged = Trial({"a": 1}, str(tmp_path / "none"), 2, {"loss": 3.0})
    # Its evaluation was over nothing: all answers were cut away.
    unjudged = Trial({"a": 2}, str(tmp_path), 2)
    assert unjudged.loss == 0.0 and Sweep("x", (unjudged, judged)).best is judged
    assert Sweep("x", (unjudged,)).best is unjudged
