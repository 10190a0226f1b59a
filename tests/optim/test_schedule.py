"""The learning rate: the published shapes, and a warm-up that is longer than the run."""

import warnings

import numpy as np
import optax
import pytest

from panax.optim import Schedule


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


def test_a_constant_rate_may_rise_for_longer_than_the_run():
    np.testing.assert_allclose(rates(Schedule(peak=1.0, warmup_steps=4, decay="constant"), 2), [0.25, 0.5], rtol=1e-6)
