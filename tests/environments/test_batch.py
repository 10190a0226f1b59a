"""A batch resets each environment by itself, keeps what the episode ended with, and draws by index."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.environments import CartPole, EnvironmentBatch


@pytest.fixture(scope="module")
def batch() -> EnvironmentBatch:
    return EnvironmentBatch(CartPole(max_steps=12))


def run(batch: EnvironmentBatch, index: jax.Array, steps: int = 40) -> tuple:
    """Transitions, with a leading axis of steps, and the ongoing episodes before each."""

    def step(ongoing, number):
        transition = batch.step(
            ongoing, jnp.ones(index.shape, jnp.int32), jax.random.fold_in(jax.random.key(1), number), index
        )
        return transition.environment_state, (ongoing, transition)

    return jax.jit(lambda: jax.lax.scan(step, batch.reset(jax.random.key(0), index), jnp.arange(steps))[1])()


def test_an_episode_ends_with_what_it_led_to_and_another_begins(batch):
    before, after = run(batch, jnp.arange(6))
    ended = np.asarray(after.ended)
    assert ended.any(axis=0).all() and not ended.all(axis=0).any()
    # A pole that is pushed to one side falls: the final observation is beyond the limits, the next one near zero.
    angle = np.abs(np.asarray(after.final_observation)[..., 2])
    assert (angle[np.asarray(after.terminated)] > 0.2).all()
    assert (np.abs(np.asarray(after.environment_state.observation)[ended]) <= 0.05).all()
    np.testing.assert_array_equal(after.final_observation[~ended], after.environment_state.observation[~ended])
    lengths = np.asarray(after.episode_length)
    np.testing.assert_array_equal(after.episode_return, lengths.astype(np.float32))
    np.testing.assert_array_equal(lengths, np.asarray(before.episode_length) + 1)
    assert (np.asarray(after.environment_state.episode_length)[ended] == 0).all()
    assert (np.asarray(after.environment_state.state.time) == np.asarray(after.environment_state.episode_length)).all()


def test_a_time_limit_is_a_truncation():
    short = EnvironmentBatch(CartPole(max_steps=3))
    _, after = run(short, jnp.arange(4), 9)
    assert np.asarray(after.truncated)[2::3].all() and not np.asarray(after.terminated).any()
    assert np.asarray(after.truncated).sum() == 12


def test_what_is_drawn_depends_on_the_index_alone(batch):
    whole, part = run(batch, jnp.arange(6)), run(batch, jnp.arange(3, 6))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:, 3:], b), whole, part)
    first = np.asarray(whole[0].observation[0])
    assert len({tuple(row) for row in first.tolist()}) == 6
