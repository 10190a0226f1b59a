"""Generalized advantages against a loop in NumPy and against stable-baselines3; a time limit is not a death."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from panax.agents import gae

GOLDEN = json.loads((Path(__file__).parent / "sb3_golden.json").read_text())["advantages"]
DISCOUNT, TRACE = 0.97, 0.9
"""As sb3_golden.py has them."""


def written_out(reward, value, following, terminated, truncated, discount, gae_lambda):
    """The sum of all later differences of the same episode, each by itself: quadratic, and without a recursion."""
    steps, environments = reward.shape
    result = np.zeros_like(reward)
    for environment in range(environments):
        for start in range(steps):
            factor = 1.0
            for step in range(start, steps):
                at = (step, environment)
                after = 0.0 if terminated[at] else following[at]
                result[start, environment] += factor * (reward[at] + discount * after - value[at])
                factor *= discount * gae_lambda
                if terminated[at] or truncated[at]:
                    break
    return result


@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
def test_equal_to_the_sum_written_out(gae_lambda):
    generator = np.random.default_rng(3)
    reward, value, following = generator.standard_normal((3, 40, 5), dtype=np.float32)
    terminated, truncated = generator.random((2, 40, 5)) < 0.1
    assert (terminated & truncated).any(), "a step that does both has terminated"
    actual = gae(
        *map(jnp.asarray, (reward, value, following, terminated, truncated)), discount=DISCOUNT, gae_lambda=gae_lambda
    )
    expected = written_out(reward, value, following, terminated, truncated, DISCOUNT, gae_lambda)
    np.testing.assert_allclose(actual.advantage, expected, atol=1e-5)
    np.testing.assert_allclose(actual.target, expected + value, atol=1e-5)


def test_equal_to_stable_baselines3():
    """Which adds the discounted value of a cut episode's last state to the reward, and calls the end a death."""
    golden = {name: np.asarray(numbers) for name, numbers in GOLDEN.items()}
    reward, value, final = (golden[name].astype(np.float32) for name in ("reward", "value", "final"))
    following = np.concatenate([value[1:], golden["last"].astype(np.float32)[None]])
    following = np.where(golden["truncated"], final, following)
    advantages = gae(
        *map(jnp.asarray, (reward, value, following, golden["terminated"], golden["truncated"])),
        discount=DISCOUNT,
        gae_lambda=TRACE,
    )
    np.testing.assert_allclose(advantages.advantage, golden["advantage"], atol=1e-5)
    np.testing.assert_allclose(advantages.target, golden["target"], atol=1e-5)
    assert golden["truncated"].any() and golden["terminated"].any()


def test_a_cut_episode_is_followed_by_its_last_states_value_and_by_nothing_of_the_next_episode():
    reward, value = jnp.ones((2, 1)), jnp.zeros((2, 1))
    following, cut = jnp.array([[50.0], [70.0]]), jnp.array([[True], [False]])
    none = jnp.zeros((2, 1), bool)
    found = gae(reward, value, following, none, cut, discount=0.9, gae_lambda=1.0)
    died = gae(reward, value, following, cut, none, discount=0.9, gae_lambda=1.0)
    assert found.target[:, 0].tolist() == pytest.approx([1 + 0.9 * 50, 1 + 0.9 * 70])
    assert died.target[:, 0].tolist() == pytest.approx([1, 1 + 0.9 * 70])
