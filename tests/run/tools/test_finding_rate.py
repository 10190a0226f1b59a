"""A range test: its recommendation for known curves, its refusals, and no run left behind."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import optax
import pytest
import tiny_recipe

import panax
from panax.cli.commands import find as command
from panax.cli.main import main
from panax.core.errors import DataError, RecipeError
from panax.data import IterableSource
from panax.optim import Optax, Schedule
from panax.run.tools.lr_page import format_rate_curve, plot_losses, write_page
from panax.run.tools.lr_search import RateRange, analyze_lr_range_test, has_diverged

PLAIN = RateRange(lowest=1e-6, highest=1.0, steps=121, smoothing=0.0)


def curve(bottom: float = 1e-2, noise: float = 0.0) -> list[float]:
    """A loss of 4 that falls to 2 where the rate is `bottom`, and rises without end behind it."""
    random, losses = np.random.default_rng(0), []
    for n in range(PLAIN.steps):
        away = math.log10(PLAIN.rate(n) / bottom)
        loss = 4 - 2 * math.exp(-(away**2)) if away < 0 else 2 + 2 * away**2
        losses.append(loss + noise * random.standard_normal())
        if has_diverged(losses, PLAIN.smoothing):
            break
    return losses


def test_a_tenth_of_the_rate_of_the_lowest_loss_and_the_steepest():
    found = analyze_lr_range_test(curve(), PLAIN)
    assert found.recommended == pytest.approx(1e-3) and found.peak == found.recommended and found.why == ""
    # The slope of exp(-x²) is greatest at x = -1/sqrt(2).
    assert found.steepest is not None and math.log10(found.steepest / 1e-2) == pytest.approx(-(0.5**0.5), abs=0.05)
    assert found.diverged and len(found.rates) < PLAIN.steps
    assert "recommended    0.001" in "\n".join(format_rate_curve(found))


def test_smoothing_sees_through_noise():
    tried = dataclasses.replace(PLAIN, smoothing=0.8)
    recommended = analyze_lr_range_test(curve(noise=0.05), tried).recommended
    assert recommended is not None and 3e-4 < recommended < 6e-3


def test_the_peak_is_what_the_rule_of_the_batch_makes_the_rate_of():
    found = analyze_lr_range_test(curve(), PLAIN, per_peak=4.0)
    assert found.peak == pytest.approx(2.5e-4) and found.recommended == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ([4.0] * 121, "the loss did not fall: use a higher --highest"),
        ([4.0 - 0.01 * n for n in range(121)], "still falls at the highest rate: use a higher --highest"),
        ([4.0, 5.0, 7.0], "the loss rose before it had fallen: use a lower --lowest"),
        ([math.nan], "not finite almost from the beginning: use a lower --lowest"),
        ([4.0 + (-1) ** n * 0.05 for n in range(121)], "the loss did not fall"),
    ],
    ids=["flat", "falling", "rising", "nan", "noise"],
)
def test_a_curve_that_does_not_allow_a_rate_explains_why(losses, why, tmp_path):
    found = analyze_lr_range_test(losses, PLAIN)
    assert found.recommended is None and found.steepest is None and why in found.why
    assert format_rate_curve(found)[-1].startswith("no rate can be recommended")
    assert "no rate can be recommended" in write_page(found, "x", tmp_path / "new/page.html").read_text()
    assert '"recommended": null' in found.to_json()


def test_a_loss_that_runs_away_leaves_room_for_the_rest():
    drawn = plot_losses([10.0**n for n in range(-4, 1)], [4.0, 3.0, 2.0, 3.0, 1e30])
    assert drawn[0].strip().startswith("5 |") and max(map(len, drawn)) <= 80
    # The lowest is in the middle of the powers of 10, and of the 66 columns behind the labels.
    assert [line.index("*") for line in drawn if "*" in line][-1] == 10 + 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lowest": 0.0}, "lowest=0, highest=1; expected rates above 0"),
        ({"lowest": 2.0}, "lowest=2, highest=1; expected rates above 0, the first below the second"),
        ({"highest": math.inf}, "highest=inf"),
        ({"steps": 5}, "steps=5; expected 20 or more"),
        ({"smoothing": 1.0}, "smoothing=1.0; expected a share in"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        panax.find_lr(tiny_recipe.tiny(), **settings)


def test_an_optimizer_with_a_rate_of_its_own_is_refused(experiment):
    own = dataclasses.replace(experiment, optimizer=Optax(transformation=optax.sgd(0.1)))
    with pytest.raises(RecipeError, match="has a built-in learning rate, so none can be tried"):
        panax.find_lr(own)


def test_the_command_refuses_and_ends_cleanly(monkeypatch, capsys):
    recipe = str(Path(tiny_recipe.__file__))
    assert main(["find", "lr", recipe, "--steps", "3"]) == 2
    assert "steps=3; expected 20 or more" in capsys.readouterr().err

    def interrupted(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "find_lr", interrupted)
    assert main(["find", "lr", recipe]) == 130
    assert capsys.readouterr().err == "panax: stopped; nothing was written\n"


@pytest.mark.slow
def test_a_real_model(experiment, tmp_path):
    """Its losses are those of training with these rates; nothing that a run would resume is left."""
    ruled = Schedule(peak=1e-3, per_batch="sqrt", base_batch=2)
    ruled = dataclasses.replace(experiment, optimizer=dataclasses.replace(experiment.optimizer, schedule=ruled))
    suggestion = panax.find_lr(ruled, steps=60, output=tmp_path / "rate.html")
    assert 1e-3 < (suggestion.recommended or 0.0) < 0.2
    # 8 rows of a base of 2: the root of 4.
    assert suggestion.peak == pytest.approx((suggestion.recommended or 0.0) / 2)
    assert suggestion.losses[0] == pytest.approx(math.log(300), abs=0.3) and min(suggestion.smoothed) < 4.9
    assert "<svg" in (tmp_path / "rate.html").read_text() and not Path(experiment.folder).exists()
    few = [batch for (batch, _), _ in zip(experiment.data.open().train.batches(), range(3))]
    task = dataclasses.replace(experiment.task, model=dataclasses.replace(experiment.task.model, vocab_size=300))
    with pytest.raises(DataError, match="the data ended after 3 steps"):
        panax.find_lr(dataclasses.replace(experiment, task=task, data=IterableSource(few, epochs=1)))
