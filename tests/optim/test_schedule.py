"""The learning rate: the published shapes, and a warm-up that is longer than the run."""

import dataclasses
import warnings

import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
import tiny

from panax.core import RecipeError
from panax.optim import AdamW, CustomSchedule, Schedule, Sgd


def rates(schedule: Schedule, steps: int) -> list[float]:
    built = schedule.build(steps)
    return [float(built(step)) for step in range(steps)]


def test_it_rises_to_the_peak_and_falls_to_the_final_share():
    found = rates(Schedule(peak=1.0, warmup_steps=4, final=0.1), 104)
    np.testing.assert_allclose(found[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)
    cosine = optax.cosine_decay_schedule(1.0, 100, 0.1)
    np.testing.assert_allclose(found[4:], [float(cosine(step)) for step in range(100)], rtol=1e-6)
    assert rates(Schedule(peak=2.0, decay="constant"), 3) == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize(("steps", "rises"), [(40, 4), (9, 0), (1, 0)])
def test_a_warm_up_longer_than_the_run_is_shortened_with_a_warning(decay, steps, rises):
    schedule = Schedule(peak=1.0, warmup_steps=40, decay=decay)
    said = f"warmup_steps=40 leaves nothing of the run's {steps} steps to decay in; the rate rises over {rises} of them"
    with pytest.warns(UserWarning, match=said):
        found = rates(schedule, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found == rates(Schedule(peak=1.0, warmup_steps=rises, decay=decay), steps)
        rates(schedule, 41)


@pytest.mark.parametrize(
    ("schedule", "reference", "options"),
    [
        (Schedule(decay="cosine", stable=0.5, final=0.2), "wsd", {"decay_type": "cosine"}),
        (Schedule(decay="linear", stable=0.5, final=0.2), "wsd", {"decay_type": "linear"}),
        (Schedule(decay="sqrt", stable=0.5, final=0.2), "wsd", {"decay_type": "1-sqrt"}),
        (Schedule(decay="cosine", cycles=4, final=0.0), "restarts", {}),
        (Schedule(decay="inverse_sqrt", warmup_steps=8), "inverse", {}),
    ],
)
def test_it_is_the_schedule_of_transformers(schedule, reference, options):
    import torch
    from transformers import optimization

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=schedule.peak)
    if reference == "wsd":
        told = optimization.get_wsd_schedule(optimizer, 0, 50, 100, min_lr_ratio=schedule.final, **options)
    elif reference == "restarts":
        told = optimization.get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, 0, 100, schedule.cycles)
    else:
        told = optimization.get_inverse_sqrt_schedule(optimizer, 8)
    wanted = []
    for _ in range(100):
        wanted.append(told.get_last_lr()[0])
        optimizer.step()
        told.step()
    actual = rates(schedule, 100)
    # Its warm-up begins at 0 and reaches the peak one step later.
    first = schedule.warmup_steps
    np.testing.assert_allclose(actual[first:], wanted[first:], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stable": 1.0}, "stable=1.0; expected a share of the run"),
        ({"cycles": 0}, "cycles=0; expected 1 or more"),
        ({"cycles": 2, "decay": "constant"}, 'cycles=2 has no effect with decay="constant"'),
        ({"stable": 0.5, "decay": "inverse_sqrt", "warmup_steps": 3}, "stable=0.5 has no effect"),
        ({"decay": "inverse_sqrt"}, "warmup_steps to 1 or more"),
        ({"final": 2.0}, "final=2.0"),
        ({"per_batch": "linear"}, "scales the peak with the batch size; set optimizer.schedule.base_batch"),
        ({"base_batch": 64}, "base_batch=64; expected 1 row or more, and optimizer.schedule.per_batch"),
        ({"peak": 0.0}, "peak=0.0"),
    ],
)
def test_settings_without_sense_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        Schedule(**settings)


@pytest.mark.parametrize(("rule", "ratio"), [("linear", 8.0), ("sqrt", 8.0**0.5), ("same", 1.0)])
def test_the_peak_grows_with_the_rows_of_a_batch_by_a_rule(rule, ratio):
    settings = {} if rule == "same" else {"per_batch": rule, "base_batch": 4}
    schedule = Schedule(peak=0.1, decay="constant", **settings)
    assert AdamW(schedule=schedule).scale_to_batch(32).learning_rate(10)(5) == pytest.approx(0.1 * ratio, rel=1e-6)
    if rule != "same":
        with pytest.raises(RecipeError, match=r"depends on the number of rows in a batch; pass it to scale_to_batch"):
            AdamW(schedule=schedule).build({"w": ("embed",)}, 10)


def test_a_run_reports_the_rate_that_its_batch_gives():
    import panax
    from panax.run.preparation import scale_learning_rate

    rule = Schedule(peak=1e-3, decay="constant", per_batch="sqrt", base_batch=16)
    experiment = panax.Experiment(
        name="told", task=tiny.task(), data=[tiny.batch()], optimizer=AdamW(schedule=rule), num_steps=2
    )
    said = []
    told = scale_learning_rate(experiment, lambda: {"tokens": np.zeros((64, 8))}, said.append)
    assert said == ["learning rate  peak 0.002 for 64 rows a batch: 0.001 times the root of 64 / 16"]
    assert told.optimizer.schedule == Schedule(peak=2e-3, decay="constant")
    plain = dataclasses.replace(experiment, optimizer=AdamW())
    assert scale_learning_rate(plain, lambda: pytest.fail("nobody asks for its rows"), said.append) is plain


def test_a_constant_rate_may_rise_for_longer_than_the_run():
    np.testing.assert_allclose(rates(Schedule(peak=1.0, warmup_steps=4, decay="constant"), 2), [0.25, 0.5], rtol=1e-6)


def test_any_function_of_the_step_is_a_schedule():
    triangle = CustomSchedule(function=lambda step: 0.1 * jnp.minimum(step, 10 - step))
    np.testing.assert_allclose(rates(triangle, 11)[:3], [0.0, 0.1, 0.2], rtol=1e-6)
    tx = Sgd(schedule=triangle).build({"w": ("embed",)}, 11)
    params, state = {"w": jnp.ones(3)}, tx.init({"w": jnp.ones(3)})
    for rate in (0.0, 0.1, 0.2):
        updates, state = tx.update({"w": jnp.ones(3)}, state, params)
        np.testing.assert_allclose(updates["w"], -rate * np.ones(3), rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda step: 0.1 if step > 3 else 0.2, "choose by jnp.where in place of if: TracerBoolConversionError"),
        (lambda step: jnp.ones(2), r"gives float32 of shape \(2,\) for a step; expected a number"),
        (lambda: 0.1, "can't be traced with a step's number"),
        (lambda step: "fast", "can't be traced with a step's number|expected a number"),
    ],
)
def test_what_is_no_function_of_the_step_is_an_error(function, message):
    with pytest.raises(RecipeError, match=message):
        CustomSchedule(function=function).build(10)


def test_the_error_for_a_bare_function_shows_the_right_form(monkeypatch):
    # The tests' own checks of types, which users don't have, would look first.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(RecipeError, match=r"wrap the function of the step: CustomSchedule\(function=...\)"):
        AdamW(schedule=lambda step: 1e-3)  # pyright: ignore
