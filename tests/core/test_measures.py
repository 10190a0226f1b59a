"""Sums with weights: merged exactly, divided once."""

import jax.numpy as jnp
import numpy as np

from panax.core import Loss, Maximum, Mean, Sum, merge_measures, total_loss


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
