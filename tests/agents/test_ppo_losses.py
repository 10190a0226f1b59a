"""PPO's losses against NumPy and against stable-baselines3."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.agents.ppo_losses import approx_kl, clip_indicator, explained_variance, policy_loss, value_loss

GIVEN = {
    name: jnp.asarray(numbers, jnp.float32)
    for name, numbers in json.loads((Path(__file__).parent / "sb3_golden.json").read_text())["losses"].items()
}


def test_equal_to_stable_baselines3():
    ratio = GIVEN["log_ratio"]
    assert jnp.isclose(policy_loss(ratio, GIVEN["advantage"], clip=0.2).mean(), GIVEN["policy_loss"], atol=1e-6)
    half = value_loss(GIVEN["value"], GIVEN["old"], GIVEN["target"], clip=0.3, form="clipped").mean()
    assert jnp.isclose(2 * half, GIVEN["value_loss"], atol=1e-6), "Panax halves the squared error"
    assert jnp.isclose(approx_kl(ratio).mean(), GIVEN["divergence"], atol=1e-6)
    assert jnp.isclose(clip_indicator(ratio, 0.2).mean(), GIVEN["clipped"], atol=1e-6)


def test_clipping_as_written_in_the_paper():
    log_ratio, advantage = np.asarray(GIVEN["log_ratio"]), np.asarray(GIVEN["advantage"])
    expected = [
        -min(np.exp(log) * gain, max(0.8, min(1.2, np.exp(log))) * gain) for log, gain in zip(log_ratio, advantage)
    ]
    np.testing.assert_allclose(policy_loss(GIVEN["log_ratio"], GIVEN["advantage"], clip=0.2), expected, rtol=1e-5)


def test_the_dual_clip_bounds_what_a_bad_action_costs_and_its_gradient():
    log_ratio, advantage = jnp.log(jnp.array([10.0, 2.0, 10.0])), jnp.array([-1.0, -1.0, 1.0])
    assert policy_loss(log_ratio, advantage, clip=0.2).tolist() == pytest.approx([10.0, 2.0, -1.2])
    assert policy_loss(log_ratio, advantage, clip=0.2, dual_clip=3.0).tolist() == pytest.approx([3.0, 2.0, -1.2])
    gradient = jax.grad(lambda log: policy_loss(log, advantage, clip=0.2, dual_clip=3.0).sum())(log_ratio)
    assert gradient.tolist() == pytest.approx([0.0, 2.0, 0.0])


@pytest.mark.parametrize("form, expected", [("larger", 0.5 * 0.9**2), ("clipped", 0.5 * 0.8**2)])
def test_value_clipping(form, expected):
    """The value has moved by 0.9 from 0.9 towards its target at 0.9, past the clip; or away from it."""
    value, old, target = jnp.array([1.8]), jnp.array([1.5]), jnp.array([0.9])
    assert value_loss(value, old, target, clip=0.2, form=form).item() == pytest.approx(expected, rel=1e-5)
    assert value_loss(value, old, target).item() == pytest.approx(0.5 * 0.9**2, rel=1e-5)


def test_explained_variance():
    target = jnp.array([1.0, 2.0, 3.0])
    assert explained_variance(target, target).item() == 1.0
    assert explained_variance(jnp.zeros(3), target).item() == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(-target, target).item() < -1.0
