"""Sums with weights: merged exactly, divided once."""

import jax.numpy as jnp
import numpy as np

from panax.core import Loss, Maximum, Mean, MeanWithInterval, Sum, merge_measures, total_loss


def f(x):
    return jnp.float32(x)


def test_merging_divides_once_by_the_whole_weight():
    a = {"loss": Loss(f(6.0), f(3.0)), "acc": Mean(f(1.0), f(1.0)), "n": Sum(f(2.0)), "peak": Maximum(f(5.0))}
    b = {"loss": Loss(f(2.0), f(1.0)), "acc": Mean(f(0.0), f(3.0)), "n": Sum(f(3.0)), "peak": Maximum(f(4.0))}
    merged = merge_measures(a, b)
    assert float(merged["loss"].mean) == 2.0
    assert float(merged["acc"].value) == 0.25
    assert float(merged["n"].value) == 5.0
    assert float(merged["peak"].value) == 5.0


def test_several_losses_have_their_own_weights_and_coefficients():
    losses = {"a": Loss(f(6.0), f(3.0)), "b": Loss(f(10.0), f(2.0), 0.1)}
    np.testing.assert_allclose(total_loss(losses), 2.0 + 0.1 * 5.0, rtol=1e-6)


def test_a_batch_without_weight_costs_nothing():
    assert float(total_loss({"a": Loss(f(0.0), f(0.0))})) == 0.0


def test_a_sample_in_parts_has_the_spread_of_the_whole():
    """Far from zero, where the difference of two sums of squares would be nothing but rounding."""
    numbers = 3000.0 + np.random.default_rng(0).standard_normal(37).astype(np.float32)
    parts = [jnp.asarray(numbers[:5]), jnp.asarray(numbers[5:]), jnp.asarray(numbers[:3])]
    counted = [jnp.ones(5), jnp.ones(32), jnp.zeros(3)]
    merged, *others = (MeanWithInterval.of(part, each) for part, each in zip(parts, counted))
    for other in others:
        merged = merged.merge(other)
    assert float(merged.count) == 37 and abs(float(merged.value) - numbers.mean()) < 1e-3
    figures = merged.statistics()
    deviation = numbers.astype(np.float64).std(ddof=1)
    np.testing.assert_allclose(figures["_std"], deviation, rtol=1e-3)
    # 2.0281 is Student's 97.5 % quantile with 36 degrees of freedom.
    np.testing.assert_allclose(figures["_ci95"], 2.0281 * deviation / np.sqrt(37), rtol=2e-3)
    assert np.isnan(MeanWithInterval.of(jnp.ones(1), jnp.ones(1)).statistics()["_ci95"])
