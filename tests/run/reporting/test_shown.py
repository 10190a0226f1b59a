"""Output of a run in Python: lines with losses, one line that changes in a notebook, nothing by choice."""

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from panax import evaluate, fit
from panax.core import DataError, RecipeError
from panax.data import IterableSource
from panax.data.loading.overfit import FirstBatches
from panax.metrics import ConsoleTracker, Peak
from panax.metrics.console import NotebookTracker, open_console
from panax.optim import AdamW, Schedule
from panax.run import EvaluateConfig
from panax.run.preparation import open_data

VALUES = {"train/loss": 3.5, "memory/bytes": 2.0**30, "seconds/step": 0.1, "train/accuracy": 0.25}


def test_files_that_are_read_are_listed_once_if_that_is_quick(experiment, tmp_path):
    data = dataclasses.replace(experiment.data, cache_dir=str(tmp_path / "cache"))
    lines: list[str] = []
    open_data(dataclasses.replace(experiment, data=data), lines.append)
    assert lines[0] == "training the tokenizer: 5 documents"
    assert lines[1].startswith("tokenizing: 5 documents, ") and lines[1].endswith(" tokens")
    files, *lengths = lines[2:]
    assert "5 files are read (5 of .py)" in files
    assert [line.partition(" of ")[0] for line in lengths] == ["4 documents", "1 held-out documents"]


def test_a_note_is_styled_and_the_bar_under_it_is_not():
    to = io.StringIO()
    console = Console(file=to, force_terminal=True, color_system="standard", width=80, soft_wrap=True, markup=False)
    say, progress = open_console(console)
    progress.begin(0, 4, Peak(1e12, "a guess"))
    to.truncate(0)
    say("warning: [odd]")
    progress.close()
    assert "\x1b[33mwarning: [odd]\x1b[0m" in to.getvalue() and "\x1b[33mtraining" not in to.getvalue()


def test_a_run_shows_its_losses_and_nothing_by_choice(experiment, capsys):
    steady = AdamW(schedule=Schedule(peak=3e-3, decay="constant"))
    short = dataclasses.replace(experiment, num_steps=2, log_every=1, optimizer=steady)
    fit(short)
    shown = capsys.readouterr().out
    assert "2/2  loss " in shown and "2/2  held-out loss " in shown and "\x1b" not in shown
    fit(dataclasses.replace(short, num_steps=3), quiet=True)
    lines: list[str] = []
    fit(dataclasses.replace(short, num_steps=4), say=lines.append)
    assert not capsys.readouterr().out and any("resuming from step 3 of 4" in line for line in lines)
    with pytest.raises(RecipeError, match="quiet shows nothing, and say receives each line: pass one"):
        fit(short, quiet=True, say=lines.append)


def test_a_notebooks_line_changes_and_an_evaluation_stays(capsys):
    tracker = NotebookTracker()
    tracker.begin(0, 20, Peak(1e12, "a guess"))
    tracker.record(10, VALUES)
    tracker.record(11, {**VALUES, "train/loss": 3.25})
    tracker.record(11, {"evaluation/loss": 3.0})
    tracker.record(12, VALUES)
    tracker.close()
    first, second, judged, last = capsys.readouterr().out.split("\r")[1:]
    assert first.startswith("    10/20  loss 3.5000  acc 25.0%") and second.startswith("    11/20  loss 3.2500")
    assert "[" not in first and "\n" not in first + second
    # It covers all of what stood there.
    assert judged.rstrip() == "    11/20  held-out loss 3.0000" and judged.endswith("\n") and len(judged) > len(second)
    assert last.endswith("\n")


def test_two_steps_of_everything_leave_nothing_behind(experiment, capsys):
    result = fit(experiment, fast_dev_run=True)
    shown = capsys.readouterr().out
    assert result.step == 2 and "loss" in result.evaluation and "2/2  held-out loss " in shown
    assert not Path(experiment.folder).exists() and not Path(result.prepared.experiment.folder).exists()
    assert result.generate("def ", tokens=2) is not None
    with pytest.raises(RecipeError, match="fast_dev_run neither resumes nor starts over"):
        fit(experiment, fast_dev_run=True, fresh=True)


def test_a_line_fits_its_width_and_states_what_takes_time():
    values = {
        "train/loss": 7.2132, "train/accuracy": 0.023, "speed/tokens_per_second": 5567.0, "speed/mfu": 0.391,
        "seconds/step": 0.368, "seconds/data_stall": 0.1, "memory/bytes": 1.87 * 2**30, "train/skipped": 3.0,
        "experts/load_min": 0.5, "experts/load_max": 1.5, "experts/dropped": 0.25,
    }  # fmt: skip
    narrow = Console(width=80, record=True, file=io.StringIO(), force_terminal=False)
    tracker = ConsoleTracker(narrow)
    tracker.begin(0, 300, Peak(1e12, "a guess"))
    tracker.record(10, values)
    tracker.record(11, {"mine/figure": 1.0})
    line = narrow.export_text().splitlines()[1:]
    assert len(line) == 1 and len(line[0]) <= 80
    # What is wrong is shown before what is good to know.
    for part in ("loss 7.2132", "5,567 tok/s", "25.0% dropped", "3 skipped", "ETA "):
        assert part in line[0], part
    assert "GiB" not in line[0]
    wide = Console(width=200, record=True, file=io.StringIO(), force_terminal=True)
    tracker = ConsoleTracker(wide)
    tracker.num_steps, tracker._first, tracker._start = 300, 0, 0.0
    tracker.record(10, values)
    shown = wide.export_text()
    assert "27% data" in shown and "1.87 GiB" in shown and "expert load 0.50 to 1.50" in shown and "hooks" not in shown


def test_a_model_learns_its_first_batches_by_heart(experiment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fast = AdamW(schedule=Schedule(peak=2e-2, decay="constant"))
    task = dataclasses.replace(experiment.task, model=dataclasses.replace(experiment.task.model, dropout=0.0))
    heart = dataclasses.replace(
        experiment,
        task=task,
        overfit_batches=1,
        num_steps=60,
        optimizer=fast,
        directory="",
        evaluate=EvaluateConfig(every=30),
    )
    lines: list[str] = []
    assert heart.folder == "runs/tiny-overfit"
    result = fit(dataclasses.replace(heart, num_steps=40), say=lines.append)
    result = fit(heart, say=lines.append)
    assert "training on the first 1 batches alone, and evaluating on them" in lines
    assert "bits_per_byte" not in result.evaluation
    assert evaluate(heart.folder)["loss"] == pytest.approx(result.evaluation["loss"], rel=1e-5)
    # What is evaluated is what was trained on.
    assert result.evaluation["loss"] < 2.0 and result.evaluation["loss"] < result.history["train/loss"].iloc[-1] + 0.05
    with pytest.raises(DataError, match="overfit_batches=5, and the data has 2 batches; lower it"):
        list(FirstBatches(IterableSource([np.zeros((2, 2))] * 2, epochs=1), 5).batches())
    with pytest.raises(RecipeError, match=r"overfit_batches=-1; expected 0 or more"):
        dataclasses.replace(heart, overfit_batches=-1)
