"""Advantages against written-out loops, and against the formulas of TRL's GRPO and RLOO trainers."""

import math

import numpy as np
import pytest

from panax.core import RecipeError
from panax.rollouts.advantages import compute_advantages

COMBINATIONS = [
    ("group", "group"), ("group", "batch"), ("group", "none"), ("others", "group"), ("others", "batch"), ("others", "none"),
    ("batch", "batch"), ("batch", "none"), ("none", "none"),
]  # fmt: skip


def deviation(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def loop(rewards, groups, counted, baseline, scale, epsilon=1e-4) -> list[float]:
    """The definition, one answer at a time."""
    rewards = rewards.astype(float).tolist()
    everyone = [number for number in range(len(rewards)) if counted[number]]
    compared: dict[int, float] = {}
    for number in everyone:
        group = [other for other in everyone if groups[other] == groups[number]]
        others = [other for other in group if other != number]
        if baseline == "none":
            compared[number] = rewards[number]
        elif baseline == "batch":
            compared[number] = rewards[number] - sum(rewards[other] for other in everyone) / len(everyone)
        elif others and baseline == "group":
            compared[number] = rewards[number] - sum(rewards[other] for other in group) / len(group)
        elif others:
            compared[number] = rewards[number] - sum(rewards[other] for other in others) / len(others)
    result = []
    for number in range(len(rewards)):
        if number not in compared:
            result.append(0.0)
            continue
        advantage = compared[number]
        if scale == "group":
            advantage /= deviation([rewards[other] for other in everyone if groups[other] == groups[number]]) + epsilon
        elif scale == "batch" and baseline == "others":
            mean = sum(compared.values()) / len(compared)
            advantage = (advantage - mean) / (deviation([*compared.values()]) + epsilon)
        elif scale == "batch":
            advantage /= deviation([rewards[other] for other in everyone]) + epsilon
        result.append(advantage)
    return result


def drawn(seed: int, num_groups: int, size: int, share: float = 1.0):
    rng = np.random.default_rng(seed)
    groups = rng.permutation(np.repeat(np.arange(num_groups) * 7 - 3, size))
    rewards = rng.normal(size=len(groups)) * 3 + 1
    return rewards, groups, rng.random(len(groups)) < share


@pytest.mark.parametrize(("baseline", "scale"), COMBINATIONS)
@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_equals_the_definition(baseline, scale, size, share):
    rewards, groups, counted = drawn(size, 5, size, share)
    rewards[~counted] = np.nan
    values, has_signal = compute_advantages(rewards, groups, counted, baseline=baseline, scale=scale)
    expected = loop(rewards, groups, counted, baseline, scale)
    np.testing.assert_allclose(values, expected, rtol=1e-9, atol=1e-9)
    assert not values[~counted].any()
    assert has_signal.tolist() == [bool(values[groups == group].any()) for group in np.unique(groups)]
    if baseline in ("group", "others"):
        assert has_signal.tolist() == [counted[groups == group].sum() > 1 for group in np.unique(groups)]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["group", "others"])
@pytest.mark.parametrize("excluded", [0, 5])
def test_equals_trl(baseline, scale, excluded):
    import torch
    from trl.trainer.utils import nanstd

    num_groups, size = 6, 4
    rng = np.random.default_rng(3)
    rewards = rng.integers(0, 3, num_groups * size).astype(np.float32)
    counted = np.ones(len(rewards), bool)
    counted[rng.choice(len(rewards), excluded, replace=False)] = False
    counted[:3] = excluded == 0  # a group with one answer left
    theirs = torch.tensor(np.where(counted, rewards, np.nan)).view(num_groups, size)
    if baseline == "group":  # trl/trainer/grpo_trainer.py, `sum_then_normalize`
        advantages = theirs - torch.nanmean(theirs, dim=1, keepdim=True)
        if scale != "none":
            advantages = advantages / (
                (nanstd(theirs, dim=1, keepdim=True) if scale == "group" else nanstd(theirs)) + 1e-4
            )
    else:  # trl/trainer/rloo_trainer.py; it has no scale of the group
        count = (~torch.isnan(theirs)).sum(dim=1, keepdim=True)
        advantages = theirs - (torch.nansum(theirs, dim=1, keepdim=True) - theirs) / (count - 1)
        if scale == "batch":
            advantages[torch.isinf(advantages)] = torch.nan
            advantages = (advantages - torch.nanmean(advantages)) / (nanstd(advantages) + 1e-4)
        elif scale == "group":
            advantages = advantages / (nanstd(theirs, dim=1, keepdim=True) + 1e-4)
    expected = torch.nan_to_num(advantages, nan=0.0, posinf=0.0, neginf=0.0).flatten().numpy()
    groups = np.repeat(np.arange(num_groups), size)
    values, _ = compute_advantages(rewards, groups, counted, baseline=baseline, scale=scale)
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, expected, atol=1e-5)


@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e10, 0.0])
@pytest.mark.parametrize(("baseline", "scale"), COMBINATIONS[:8])
def test_equal_rewards_have_no_signal_whatever_their_mean_is_rounded_to(baseline, scale, value):
    for size in (1, 2, 3, 7):
        rewards, groups, counted = np.full(2 * size, value), np.repeat([0, 1], size), np.ones(2 * size, bool)
        values, has_signal = compute_advantages(rewards, groups, counted, baseline=baseline, scale=scale)
        assert values.tolist() == [0.0] * 2 * size and has_signal.tolist() == [False, False]


def test_a_baseline_of_the_batch_finds_signal_in_groups_of_equal_rewards():
    rewards, groups, counted = np.array([1.0, 1.0, 0.0, 0.0]), np.array([0, 0, 1, 1]), np.ones(4, bool)
    values, has_signal = compute_advantages(rewards, groups, counted, baseline="batch", scale="none")
    assert values.tolist() == [0.5, 0.5, -0.5, -0.5] and has_signal.all()
    assert not compute_advantages(rewards, groups, counted).has_signal.any()


@pytest.mark.parametrize(("baseline", "scale"), COMBINATIONS)
def test_groups_without_a_counted_answer_and_empty_batches(baseline, scale):
    nothing = compute_advantages(
        np.full(3, np.nan), np.array([4, 4, 9]), np.zeros(3, bool), baseline=baseline, scale=scale
    )
    assert nothing.values.tolist() == [0.0] * 3 and nothing.has_signal.tolist() == [False, False]
    empty = compute_advantages(np.zeros(0), np.zeros(0, int), np.zeros(0, bool), baseline=baseline, scale=scale)
    assert empty.values.shape == (0,) and empty.has_signal.shape == (0,)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_counted_reward_that_is_not_finite_is_an_error(bad):
    with pytest.raises(ValueError, match=r"the rewards of \[1\] are not finite"):
        compute_advantages(np.array([0.0, bad, bad]), np.zeros(3, int), np.array([True, True, False]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"baseline": "batch", "scale": "group"}, "use scale in {'batch', 'none'}, or baseline='group'"),
        ({"baseline": "none", "scale": "batch"}, "use scale in {'none'}"),
        ({"baseline": "grup"}, "did you mean 'group'"),
        ({"scale": "btch"}, "did you mean 'batch'"),
    ],
)
def test_settings_that_are_refused(settings, message):
    from panax.rollouts.advantages import check_advantage_settings

    with pytest.raises(RecipeError, match=message):
        check_advantage_settings(**{"baseline": "group", "scale": "group", **settings})
