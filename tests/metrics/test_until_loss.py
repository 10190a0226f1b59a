"""What runs took to a held-out loss: by hand from their files, and refusals."""

import json

import pytest
from reported import BEGAN, write_failed_twice, write_lines, write_metrics

import panax
from panax.cli.main import main
from panax.core.errors import DataError, RecipeError


def test_steps_samples_time_and_cost_of_a_run_that_failed_twice(tmp_path):
    write_failed_twice(tmp_path / "a")
    # Held-out losses of 0.55, 0.275, 0.1833, 0.1375 at steps 10, 20, 30, 40.
    [outcome] = panax.time_to_loss(tmp_path / "a", loss=0.2, price_per_hour=3.0)
    assert (outcome.step, outcome.unit, outcome.note) == (30, "tokens", "")
    assert outcome.loss == pytest.approx(5.5 / 30)
    # A line a step: 1000 + its number tokens a second, half a second each.
    assert outcome.units == pytest.approx(sum((1000 + step) * 0.5 for step in range(1, 31)))
    # Step 30 was taken last in the third session, a third of the way from 65.5 (step 25) to 80 (step 40); nobody was at it
    # from 55 to 65 but the devices waited, of which there were 4, 2 and 4.
    at = 65.5 + 14.5 / 3
    assert outcome.seconds == pytest.approx(at)
    hours = (30 * 4 + (65 - 30) * 2 + (at - 65) * 4) / 3600
    assert outcome.device_hours == pytest.approx(hours)
    assert outcome.cost == pytest.approx(3.0 * hours)
    race = panax.time_to_loss(tmp_path / "a", loss=0.1375)[0]
    assert race.step == 40 and race.seconds == pytest.approx(80) and race.cost is None


def test_between_evaluations_only_if_configured(tmp_path):
    write_metrics(tmp_path / "a")
    [plain] = panax.time_to_loss(tmp_path / "a", loss=0.4)
    [between] = panax.time_to_loss(tmp_path / "a", loss=0.4, interpolate=True)
    assert plain.step == 20
    assert between.step == pytest.approx(10 + 10 * (0.55 - 0.4) / (0.55 - 0.275))
    assert between.units is not None and plain.units is not None and between.units < plain.units
    # Without a ledger: half a second for each step, and no number of devices.
    assert plain.seconds == pytest.approx(10.0) and plain.device_hours is None
    assert "time of the steps alone" in plain.note


def test_runs_that_never_come_there_report_it(tmp_path):
    write_metrics(tmp_path / "far")
    write_lines(tmp_path / "blind/metrics.jsonl", [{"step": 1, "train/loss": 2.0}])
    write_metrics(tmp_path / "soon")
    far, blind = panax.time_to_loss(tmp_path / "far", tmp_path / "blind", loss=0.01)
    assert far.step is None and far.seconds is None and "not reached: 0.1375 at best, at step 40" in far.note
    assert blind.step is None and blind.loss is None and "never evaluated: set evaluate.every" in blind.note
    [soon] = panax.time_to_loss(tmp_path / "soon", loss=9.0, interpolate=True)
    assert soon.step == 10 and "by its first evaluation" in soon.note


def test_an_evaluation_that_is_not_finite_does_not_count(tmp_path):
    rows = [{"step": step, "evaluation/loss": loss} for step, loss in ((1, 3.0), (2, None), (3, 2.0))]
    write_lines(tmp_path / "a/metrics.jsonl", rows)
    [found] = panax.time_to_loss(tmp_path / "a", loss=2.5, interpolate=True)
    assert found.step == pytest.approx(2.0) and found.units is None and found.seconds is None


def test_the_command_shows_a_row_for_each(tmp_path, capsys):
    write_failed_twice(tmp_path / "a")
    write_metrics(tmp_path / "b")
    arguments = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--until-loss", "0.2", "--price-per-hour", "360"]
    assert main([*arguments, "--currency", "EUR"]) == 0
    head, first, second, *notes = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "steps", "to", "0.2", "tokens", "time", "device-hours", "cost", "loss"]
    assert first.split()[:2] == ["tiny", "30"] and "21.13 EUR" in first
    assert second.split() == ["b", "30", "15,232", "15", "s", "—", "—", "0.1833"]
    assert notes == ["", "b: time of the steps alone: there is no goodput.jsonl"]
    assert main(["compare", str(tmp_path / "b"), "--until-loss", "0.001"]) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("RUN", "--until-loss", "nan"), "until_loss=nan; expected a held-out loss: a finite number"),
        (("RUN", "--until-loss", "2", "--price-per-hour", "-1"), "price_per_hour=-1.0; expected the price of an hour"),
        (("RUN", "--until-loss", "2", "--price-per-hour", "inf"), "price_per_hour=inf"),
        (("RUN", "--until-loss", "2", "--price-per-hour", "0"), "a number above 0, as in --price-per-hour 2.5"),
        (("RUN", "--until-loss", "2", "--currency", "EUR"), "--currency has no effect without a price"),
        (("RUN", "--until-loss", "2", "--batch-size", "4"), "--batch-size has no effect with --until-loss"),
        (("RUN", "RUN", "--until-loss", "2"), "is given twice; pass each run once"),
        (("vit", "--until-loss", "2"), "'vit' has images of noise, which can't be learned from; pass a recipe"),
        (("decoder", "--until-loss", "nan"), "until_loss=nan; expected a held-out loss: a finite number"),
        (
            ("decoder", "--until-loss", "2", "--evaluate-every", "0"),
            "evaluate_every=0, max_steps=2000; expected 1 step",
        ),
        (
            ("decoder", "--until-loss", "2", "--max-steps", "9"),
            "evaluate_every=25, max_steps=9; expected 1 step or more",
        ),
        (("decoder", "--until-loss", "2", "--steps", "9"), "--steps has no effect with --until-loss"),
        (("decoder", "--until-loss", "2", "--interpolate"), "--interpolate is for folders of runs"),
        (("decoder", "--until-loss", "2", "--price-per-hour", "-1"), "rate=-1.0; expected the price of a device-hour"),
        (("decoder", "RUN", "--until-loss", "2"), "can't be compared at once"),
        (("decoder", "--max-steps", "9"), "--max-steps has no effect without --until-loss"),
        (("RUN", "--until-loss", "2", "--max-steps", "9"), "--max-steps has no effect with --until-loss and folders"),
        (("vit", "--price-per-hour", "2"), "--price-per-hour has no effect without --until-loss"),
        (("vit", "decoder"), "pass one work, or folders of runs with --until-loss"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, capsys, arguments, expected):
    write_metrics(tmp_path / "a")
    assert main(["compare", *(str(tmp_path / "a") if word == "RUN" else word for word in arguments)]) == 2
    assert expected in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="is not a run's folder"):
        panax.time_to_loss(tmp_path, loss=2.0)
    with pytest.raises(RecipeError, match="expected the folder of a run"):
        panax.time_to_loss(loss=2.0)


def test_other_units_are_counted_by_their_name(tmp_path):
    lines = [{"step": 5, "speed/images_per_second": 100.0, "seconds/step": 0.1}, {"step": 5, "evaluation/loss": 1.0}]
    write_lines(tmp_path / "metrics.jsonl", lines)
    line = {"session": 1, "from": BEGAN, "to": BEGAN + 10, "step": 5, "seconds": {"training": 10.0}}
    (tmp_path / "goodput.jsonl").write_text(json.dumps(line) + "\n")
    [found] = panax.time_to_loss(tmp_path, loss=1.0)
    assert (found.unit, found.units, found.seconds) == ("images", pytest.approx(50.0), pytest.approx(10.0))
