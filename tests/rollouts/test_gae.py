"""Advantages of actions against a loop over each answer in float64, with holes, cut answers and excluded ones."""

import dataclasses
import math

import numpy as np
import pytest

from panax.core.batch_checks import MASK_LEAF, OLD_LEAF, OLD_VALUE_LEAF, REFERENCE_LEAF, RETURN_LEAF
from panax.core.errors import RecipeError
from panax.rollouts import Gae
from panax.rollouts.gae import add_value_advantages, estimate_advantages, explained_variance


def loop(gamma, lam, rewards, values):
    """The definition: each advantage is a sum over all later errors, without the recursion."""
    after = [*values[1:], 0.0]
    errors = [r + gamma * nxt - v for r, v, nxt in zip(rewards, values, after, strict=True)]
    count = len(errors)
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, count)) for t in range(count)]


def rows(seed=0, count=6, length=12):
    rng = np.random.default_rng(seed)
    mask = (rng.random((count, length)) < 0.6).astype(np.float32)
    mask[0], mask[1, :-1], mask[2] = 0.0, 0.0, 1.0
    mask[1, -1] = 1.0
    values, log_ratio = rng.normal(size=(2, count, length)).astype(np.float32)
    rewards = rng.normal(size=count)
    rewards[0] = math.nan
    return mask, np.where(mask > 0, values, 50.0).astype(np.float32), log_ratio, rewards


@pytest.mark.parametrize(
    "settings",
    [Gae(), Gae(gamma=0.9, lam=0.7), Gae(lam=0.0, kl_in_reward=0.3), Gae(gamma=0.95, lam=1.0, kl_in_reward=0.1)],
)
def test_equals_a_loop_over_the_actions_of_each_answer(settings):
    """What stands between the actions of an answer, such as a tool's output, is skipped."""
    mask, values, log_ratio, rewards = rows()
    plain = estimate_advantages(dataclasses.replace(settings, whiten=False), rewards, values, mask, log_ratio)
    expected, returns = np.zeros((2, *mask.shape))
    for row in range(1, len(mask)):
        places = np.flatnonzero(mask[row])
        per_action = -settings.kl_in_reward * log_ratio[row, places].astype(np.float64)
        per_action[-1] += rewards[row]
        of_row = values[row, places].astype(np.float64)
        expected[row, places] = loop(settings.gamma, settings.lam, per_action, of_row)
        returns[row, places] = expected[row, places] + of_row
    np.testing.assert_allclose(plain.advantages, expected, atol=1e-10)
    np.testing.assert_allclose(plain.returns, returns, atol=1e-10)
    white = estimate_advantages(dataclasses.replace(settings, whiten=True), rewards, values, mask, log_ratio)
    chosen = white.advantages[mask > 0]
    assert chosen.mean() == pytest.approx(0.0, abs=1e-12) and chosen.std() == pytest.approx(1.0, rel=1e-6)
    assert not white.advantages[mask == 0].any()
    np.testing.assert_array_equal(white.returns, plain.returns)


def test_the_reward_alone_counts_without_discount_and_with_exact_later_weights():
    mask, values, _, rewards = rows(1)
    result = estimate_advantages(Gae(lam=1.0, whiten=False), rewards, values, mask)
    for row in range(1, len(mask)):
        np.testing.assert_allclose(result.returns[row][mask[row] > 0], rewards[row])


def test_figures_and_leaves():
    mask, values, log_ratio, rewards = rows(2)
    leaves = {MASK_LEAF: mask, OLD_VALUE_LEAF: values, OLD_LEAF: log_ratio, REFERENCE_LEAF: np.zeros_like(log_ratio)}
    made, figures = add_value_advantages(Gae(kl_in_reward=0.1), leaves, rewards)
    counted = mask > 0
    assert figures["kl"] == pytest.approx(log_ratio[counted].mean(), rel=1e-6)
    errors = made[RETURN_LEAF][counted] - values[counted]
    assert figures["explained_variance"] == pytest.approx(1 - errors.var() / made[RETURN_LEAF][counted].var(), rel=1e-5)
    assert made["advantage"].dtype == np.float32 and all(made[name] is leaf for name, leaf in leaves.items())
    assert add_value_advantages(None, leaves, rewards) == (leaves, {})
    assert math.isnan(explained_variance(values, np.ones_like(values), mask))
    # A rollout of excluded answers alone.
    nothing, figures = add_value_advantages(Gae(), leaves | {MASK_LEAF: np.zeros_like(mask)}, rewards)
    assert not nothing["advantage"].any() and figures == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 1.5}, r"data\.gae\.gamma=1\.5; expected a number from 0 to 1"),
        ({"lam": -0.1}, r"data\.gae\.lam=-0\.1"),
        ({"kl_in_reward": math.inf}, r"data\.gae\.kl_in_reward=inf"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        Gae(**settings)
