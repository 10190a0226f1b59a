"""Targets and losses of DQN and SAC against loops in NumPy; a time limit is not a death."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.agents.q_losses import (
    action_value,
    best_value,
    dueling_values,
    soft_value,
    td_loss,
    td_target,
    temperature_loss,
)

ROWS, ACTIONS, DISCOUNT = 40, 5, 0.97


@pytest.fixture(scope="module")
def numbers() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "reward": generator.standard_normal(ROWS, dtype=np.float32),
        "terminated": generator.random(ROWS) < 0.3,
        "own": generator.standard_normal((ROWS, ACTIONS), dtype=np.float32),
        "target": generator.standard_normal((ROWS, ACTIONS), dtype=np.float32),
        "action": generator.integers(ACTIONS, size=ROWS).astype(np.int32),
    }


def test_targets_of_dqn(numbers):
    """Plain, and double: the network that is trained picks, the target network values."""
    for double in (False, True):
        expected = np.zeros(ROWS)
        for row in range(ROWS):
            by = numbers["own"] if double else numbers["target"]
            following = numbers["target"][row, np.argmax(by[row])]
            expected[row] = numbers["reward"][row]
            if not numbers["terminated"][row]:
                expected[row] += DISCOUNT * following
        best = best_value(jnp.asarray(numbers["target"]), jnp.asarray(numbers["own"]) if double else None)
        reward, terminated = jnp.asarray(numbers["reward"]), jnp.asarray(numbers["terminated"])
        np.testing.assert_allclose(
            td_target(reward, terminated, best, discount=DISCOUNT), expected, rtol=1e-5, atol=1e-6
        )


def test_a_time_limit_is_not_a_death():
    """The same last step, cut or died: only what followed a death is worth nothing."""
    reward, following = jnp.array([1.0]), jnp.array([50.0])
    cut, died = (td_target(reward, jnp.array([flag]), following, discount=0.9).item() for flag in (False, True))
    assert (cut, died) == (46.0, 1.0)


def test_values_of_actions_taken_and_their_gradient(numbers):
    own, action = jnp.asarray(numbers["own"]), jnp.asarray(numbers["action"])
    np.testing.assert_array_equal(action_value(own, action), numbers["own"][np.arange(ROWS), numbers["action"]])
    gradient = jax.grad(lambda values: action_value(values, action).sum())(own)
    np.testing.assert_array_equal(gradient, np.eye(ACTIONS, dtype=np.float32)[numbers["action"]])


def test_errors(numbers):
    torch = pytest.importorskip("torch")
    value, target = 3 * numbers["own"][:, 0], numbers["target"][:, 0]
    for form, theirs in (
        ("squared", lambda a, b: 0.5 * torch.nn.functional.mse_loss(a, b, reduction="none")),
        ("huber", lambda a, b: torch.nn.functional.smooth_l1_loss(a, b, reduction="none")),
    ):
        expected = theirs(torch.from_numpy(value), torch.from_numpy(target)).numpy()
        np.testing.assert_allclose(
            td_loss(jnp.asarray(value), jnp.asarray(target), form=form), expected, rtol=1e-5, atol=1e-6
        )


def test_duelling(numbers):
    value = numbers["reward"]
    expected = np.stack([value[row] + numbers["own"][row] - numbers["own"][row].mean() for row in range(ROWS)])
    np.testing.assert_allclose(
        dueling_values(jnp.asarray(numbers["own"]), jnp.asarray(value)), expected, rtol=1e-5, atol=1e-6
    )


def test_soft_values_and_the_temperature(numbers):
    values, log_prob = numbers["own"][:, :2].T, numbers["reward"]
    expected = [min(values[0, row], values[1, row]) - 0.3 * log_prob[row] for row in range(ROWS)]
    actual = soft_value(jnp.asarray(values), jnp.asarray(log_prob), jnp.float32(0.3))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)

    def loss(log_temperature):
        return temperature_loss(log_temperature, jnp.asarray(log_prob), target_entropy=-2.0).mean()

    # Where the entropy, here the mean of -log_prob, is below its target, going downhill raises the temperature.
    assert jax.grad(loss)(jnp.float32(0.0)) == pytest.approx(-(log_prob - 2.0).mean(), abs=1e-6)
