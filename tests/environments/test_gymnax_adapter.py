"""gymnax's environments by the protocol: the steps are gymnax's own, and its time limit truncates."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.core import RecipeError
from panax.core.install_hints import install_command
from panax.environments import Box, Discrete, EnvironmentBatch, Gymnax, check_environment

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="gymnax is for jax below 0.12, which the tests have on Python 3.11"
)


@pytest.fixture(autouse=True)
def lenient():
    """gymnax mixes dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_breakout_steps_as_gymnax_does():
    import gymnax

    ours, (theirs, parameters) = Gymnax(name="Breakout-MinAtar"), gymnax.make("Breakout-MinAtar")
    assert ours.action_space == Discrete(count=3) and ours.observation_space == Box(
        low=0.0, high=1.0, shape=(10, 10, 4)
    )
    step, theirs_step = jax.jit(ours.step), jax.jit(theirs.step_env)
    state, observation = ours.reset(jax.random.key(0))
    seen, same = theirs.reset_env(jax.random.key(0), parameters)
    np.testing.assert_array_equal(observation, seen)
    ended = False
    for number in range(60):
        key, action = jax.random.key(number), jnp.int32(number * 7 % 3)
        ours_now = step(state, action, key)
        seen, same, reward, done, _ = theirs_step(key, same, action, parameters)
        np.testing.assert_array_equal(ours_now.observation, seen)
        assert float(ours_now.reward) == float(reward) and bool(ours_now.terminated) == bool(done)
        state, ended = ours_now.state, ended or bool(done)
        if done:
            break
    assert ended
    frame = ours.render(jax.tree.map(np.asarray, state))
    assert frame is not None and frame.shape == (120, 120, 3)


def test_a_time_limit_truncates_and_does_not_terminate():
    batch = EnvironmentBatch(Gymnax(name="Pendulum-v1", parameters={"max_steps_in_episode": 3}))
    ongoing = batch.reset(jax.random.key(0), jnp.arange(2))
    step = jax.jit(batch.step)
    for number in range(3):
        after = step(ongoing, jnp.zeros((2, 1), jnp.float32), jax.random.key(number), jnp.arange(2))
        ongoing = after.environment_state
    assert after.truncated.all() and not after.terminated.any() and (after.episode_length == 3).all()
    assert not np.array_equal(after.final_observation, ongoing.observation)


def test_what_gymnax_has_keeps_the_contract():
    check_environment(Gymnax(name="Catch-bsuite"), steps=12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "Brekout-MinAtar"}, "did you mean 'Breakout-MinAtar'"),
        ({"name": "CartPole-v1", "parameters": {"max_steps": 3}}, "did you mean 'max_steps_in_episode'"),
        ({"name": "CartPole-v1", "options": {"color": 3}}, "don't build CartPole-v1"),
    ],
)
def test_what_gymnax_has_not_is_refused(settings, message):
    with pytest.raises(RecipeError, match=message):
        Gymnax(**settings)


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(
        RecipeError, match=rf"needs gymnax.*{re.escape(install_command('gymnax'))} \(gymnax is for jax below 0.12\)"
    ):
        Gymnax(name="CartPole-v1")
