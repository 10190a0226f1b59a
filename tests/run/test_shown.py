"""What a run shows in Python: lines with losses, one line that changes in a notebook, nothing by choice."""

import dataclasses
from pathlib import Path

import pytest

from panax import fit
from panax.core import RecipeError
from panax.metrics import Peak
from panax.metrics.console import NotebookTracker
from panax.optim import AdamW, Schedule

VALUES = {"train/loss": 3.5, "memory/bytes": 2.0**30, "seconds/step": 0.1, "train/accuracy": 0.25}


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
    with pytest.raises(RecipeError, match="quiet shows nothing, say takes what there is to show: give one"):
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
