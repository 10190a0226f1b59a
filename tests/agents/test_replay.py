"""A replay buffer keeps the last transitions of each environment, draws evenly, and is refused if it does not fit."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from panax.agents.replay import Experience, Replay, check_memory
from panax.core import RecipeError
from panax.environments import Box

ENVIRONMENTS, PLACES = 3, 12


def ring(places: int = PLACES) -> Replay:
    seen = Box(low=0.0, high=255.0, shape=(2,), dtype="uint8")
    return Replay.create(seen, jax.ShapeDtypeStruct((), jnp.int32), ENVIRONMENTS, places)


def steps(first: int, count: int) -> Experience:
    """Transitions (time, environment, ...) with their time and environment as content."""
    number = jnp.asarray(np.arange(first, first + count)[:, None] + 100.0 * np.arange(ENVIRONMENTS), jnp.float32)
    seen = jnp.stack([number, number], axis=-1).astype(jnp.uint8)
    return Experience(seen, number.astype(jnp.int32), number, number > 1000, seen)


def test_the_last_transitions_are_kept_each_in_its_environments_row():
    replay = ring()
    assert replay.experience.observation.dtype == jnp.uint8
    add = jax.jit(Replay.add)
    for first in range(0, 20, 4):
        replay = add(replay, steps(first, 4))
        assert int(replay.size) == min(first + 4, PLACES)
    rewards = np.sort(replay.experience.reward, axis=1)
    expected = np.arange(8, 20)[None] + 100.0 * np.arange(ENVIRONMENTS)[:, None]
    np.testing.assert_array_equal(rewards, expected)
    # Leaves stay together.
    np.testing.assert_array_equal(replay.experience.action, replay.experience.reward)
    np.testing.assert_array_equal(replay.experience.observation[..., 0], replay.experience.reward.astype(np.uint8))


def test_what_it_begins_with_may_be_fewer_than_a_whole_turn():
    replay = ring().add_first(steps(0, 4))
    np.testing.assert_array_equal(replay.experience.reward[1, :5], [100, 101, 102, 103, 0])
    replay = replay.add(steps(4, 4))
    np.testing.assert_array_equal(replay.experience.reward[1], [100, 101, 102, 103, 104, 105, 106, 107, 0, 0, 0, 0])


def test_drawing_is_even_over_what_is_kept_and_depends_on_the_environments_number():
    replay, row = ring().add_first(steps(0, 6)), jnp.arange(ENVIRONMENTS)
    drawn = replay.sample(row, jax.random.key(0), 6000)
    assert drawn.observation.shape == (ENVIRONMENTS * 6000, 2)
    counts = np.bincount(np.asarray(drawn.reward).astype(int), minlength=206).reshape(-1)
    for environment in range(ENVIRONMENTS):
        environment_counts = counts[100 * environment : 100 * environment + 6]
        assert environment_counts.sum() == 6000 and (np.abs(environment_counts - 1000) < 150).all()
    part = Replay(jax.tree.map(lambda leaf: leaf[1:2], replay.experience), replay.added)
    alone = part.sample(row[1:2], jax.random.key(0), 6000)
    np.testing.assert_array_equal(alone.reward, drawn.reward.reshape(ENVIRONMENTS, 6000)[1])
    assert (drawn.reward.reshape(ENVIRONMENTS, 6000)[0] != drawn.reward.reshape(ENVIRONMENTS, 6000)[1] - 100).any()


def test_a_ring_that_does_not_fit_is_refused_with_its_bytes():
    """2 + 2 bytes of observations, 4 of an action, 4 of a reward and 1 flag: 13 for a transition."""
    replay = jax.eval_shape(lambda: ring(1000))
    half = types.SimpleNamespace(
        shard_shape=lambda shape: (shape[0], shape[1] // 2, *shape[2:]), addressable_devices=()
    )
    shardings = jax.tree.map(lambda leaf: half, replay)
    check_memory(replay, shardings, free_bytes=13 * 1500)
    with pytest.raises(
        RecipeError,
        match=r"task.capacity=3,000: the replay buffer takes 19,500 bytes on each device \(39,000 in all, 13 for a transition\), "
        r"and there are 6,500; lower task.capacity to 999 or fewer",
    ):
        check_memory(replay, shardings, free_bytes=6500)


def test_rings_of_runs_side_by_side_are_counted_together():
    """Three of the rings above, each too small to be refused by itself."""
    replay = jax.eval_shape(lambda: ring(1000))
    unsharded = types.SimpleNamespace(shard_shape=lambda shape: shape, addressable_devices=())
    shardings = jax.tree.map(lambda leaf: unsharded, replay)
    check_memory(replay, shardings, free_bytes=117_000, runs=(3,))
    with pytest.raises(
        RecipeError,
        match=r"task.capacity=3,000, in each of 3 runs side by side: the replay buffer takes 117,000 bytes on each device "
        r"\(117,000 in all, 13 for a transition\), and there are 78,000; lower task.capacity to 1,998 or fewer, lower "
        r"Seeds.count, or take more devices",
    ):
        check_memory(replay, shardings, free_bytes=78_000, runs=(3,))
