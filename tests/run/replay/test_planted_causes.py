"""Planted causes of NaN and spikes: the place that an opened step names is theirs."""

import jax
import numpy as np
import pytest
from run.replay.faulty import FaultyData, faulty_experiment

import panax
from panax.optim import AdamW, Schedule
from panax.train.taps.program_tree import StepPhase

STEP = 4


def opened(folder, *cause, **settings):
    """Train past the fault on one device, and open its step."""
    experiment = faulty_experiment(folder, *cause, **settings)
    devices = jax.devices()[:1]
    panax.fit(experiment, quiet=True, devices=devices)
    view = panax.at(experiment, STEP, devices=devices)
    assert view.replay.is_verified, view.verdict
    assert view.replay.conditions == ()
    return view


@pytest.mark.parametrize(
    ("weak", "fault", "path", "phase", "operation", "kind"),
    [
        ("norm without epsilon", "zeros", "layers.0/norm", StepPhase.FORWARD, "div", "NaN"),
        ("exponential without maximum", "huge", "head", StepPhase.FORWARD, "exp", "infinity"),
        ("root of zero", "zeros", "head", StepPhase.FORWARD, None, "infinity"),
        ("logarithm", "zeros", "objective", StepPhase.FORWARD, "log", "infinity"),
        ("labels unchecked", "label", "objective", StepPhase.FORWARD, None, "NaN"),
    ],
)
def test_origin_of_what_is_not_finite(tmp_path, weak, fault, path, phase, operation, kind):
    view = opened(tmp_path, weak, FaultyData(STEP, fault=fault))
    assert view.origin is not None
    assert (view.origin.path, view.origin.phase) == (path, phase)
    assert operation in (None, view.origin.operation)
    assert kind in (None, view.origin.kind)
    assert "faulty.py" in view.origin.line
    # The derivative of a root at 0 is computed beside the loss, which is finite.
    assert view.origin.result == ("gradient_norm" if weak == "root of zero" else "loss")
    # The step's update was skipped, as the run did.
    assert all(each.update.norm == 0 for each in view.parameters)


def test_nan_in_the_batch(tmp_path):
    view = opened(tmp_path, "", FaultyData(STEP, fault="nan"))
    assert view.origin is not None
    assert (view.origin.operation, view.origin.phase, view.origin.kind) == ("batch.x", None, "NaN")
    assert view.origin.through[-1:] and "entrance" in view.origin.through


def test_a_row_that_makes_the_spike(tmp_path):
    """The shares of rows sum to 1, and the step without the row is the mean over the others."""
    view = opened(tmp_path, "logarithm", FaultyData(STEP, row=5, fault="label"))
    assert view.origin is None
    assert not isinstance(view.rows, str)
    assert view.rows.is_additive
    outcome = view.what_if(without_rows=(5,))
    rows = np.array(view.rows.losses)
    # Weights are constants of this task: the loss without a row is the sum over the others.
    assert outcome.after["loss"] == pytest.approx(np.delete(rows, 5).sum(), rel=8 * float(np.finfo(np.float32).eps))
    assert view.replay.scalars["loss"] == pytest.approx(rows.sum(), rel=8 * float(np.finfo(np.float32).eps))
    with pytest.raises(panax.core.errors.RecipeError, match="0 to 7"):
        view.what_if(without_rows=(8,))


def test_a_learning_rate_too_high_and_a_dead_expert(tmp_path):
    rate = AdamW(schedule=Schedule(peak=3.0, decay="constant"))
    view = opened(tmp_path, "", FaultyData(dead=(2,)), optimizer=rate)
    found = "\n".join(view.findings)
    assert "learning rate may be too high" in found and "experts" in found
    assert "expert 2 of layer 0, expert 2 of layer 1" in found
    assert "expert 1 of" not in found
