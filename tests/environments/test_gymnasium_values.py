"""What gymnasium's environments take and give: cast if no value changes, refused by name if one would."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces

from panax.core import RecipeError
from panax.environments import Box, EnvironmentBatch, Gymnasium
from panax.environments.host_values import (
    first_observation,
    to_bool_flag,
    to_device_observation,
    to_float_reward,
    to_host_action,
)
from panax.environments.spaces import normalize_bounds

WIDE = spaces.Box(0, 2**40, (2,), np.int64)
FLOATS = spaces.Box(-1, 1, (2,), np.float32)
BYTES = spaces.Box(0, 255, (2,), np.uint8)


@pytest.mark.parametrize(
    ("space", "given", "expected"),
    [
        pytest.param(FLOATS, np.array([1, 2]), np.array([1, 2], np.float32), id="int64 for float32"),
        pytest.param(FLOATS, [0.5, 1], np.array([0.5, 1], np.float32), id="a list"),
        pytest.param(FLOATS, np.array([True, False]), np.array([1, 0], np.float32), id="bool for float32"),
        pytest.param(WIDE, np.array([7, 2**31 - 1]), np.array([7, 2**31 - 1], np.int32), id="int64 that fits"),
        pytest.param(BYTES, np.array([3.0, 255.0]), np.array([3, 255], np.uint8), id="whole floats for uint8"),
        pytest.param(spaces.Discrete(4), np.int64(3), np.array(3, np.int32), id="Discrete"),
        pytest.param(spaces.Box(-1, 1, ()), 0.5, np.array(0.5, np.float32), id="no dimension"),
    ],
)
def test_observations_are_cast_where_no_value_changes(space, given, expected):
    found = to_device_observation(space, given)
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == expected.dtype and not np.shares_memory(found, np.asarray(given))


@pytest.mark.parametrize(
    ("space", "given", "message"),
    [
        (WIDE, np.array([2**33, 0]), r"an observation with 8589934592 \(int64\).*which Panax holds in int32"),
        (BYTES, np.array([-1, 0]), r"an observation with -1 \(int64\); its space declares uint8 of shape \(2,\)"),
        (BYTES, np.array([0.5, 1]), r"an observation with 0.5 \(float64\)"),
        (BYTES, np.array([np.nan, 1]), r"an observation with nan \(float64\)"),
        (FLOATS, np.array([1e300, 0]), r"an observation with 1e\+300 \(float64\)"),
        (FLOATS, np.zeros((2, 1)), r"shape \(2, 1\); its space declares float32 of shape \(2,\)"),
        (FLOATS, {"x": 1}, r"an observation of object \(dict\)"),
        (FLOATS, None, r"an observation of object \(NoneType\)"),
    ],
)
def test_observations_that_would_change_are_refused(space, given, message):
    with pytest.raises(TypeError, match=message):
        to_device_observation(space, given)


def test_rewards_and_flags_are_one_number_each():
    for value in (1, 1.0, True, np.uint8(1), np.array([1.0]), np.array([[1]], np.uint8), np.float64(1)):
        assert to_float_reward(value) == np.float32(1) and to_float_reward(value).dtype == np.float32
        assert to_bool_flag("terminated", value) is True
    for value in (None, "1", np.ones(2), [], {"a": 1.0}, 1j):
        with pytest.raises(TypeError, match="step returned a reward that is"):
            to_float_reward(value)
        with pytest.raises(TypeError, match="step returned truncated="):
            to_bool_flag("truncated", value)
    for value in (0.5, 2, "False"):
        with pytest.raises(TypeError, match="expected True or False"):
            to_bool_flag("terminated", value)


@pytest.mark.parametrize("given", [np.zeros(2, np.float32), (np.zeros(2), None), (0.0, 0.0), [np.zeros(2), {}]])
def test_the_reset_before_gymnasium_is_refused_in_words(given):
    class Old:
        observation_space = FLOATS

        def reset(self, *, seed):
            return given

    with pytest.raises(TypeError, match=r"reset returned a .*; expected \(observation, info\)"):
        first_observation(Old(), 0)


def test_actions_are_of_the_environments_own_space():
    assert (
        to_host_action(spaces.Discrete(3), np.int32(2)) == 2
        and type(to_host_action(spaces.Discrete(3), np.int32(2))) is int
    )
    scalar = spaces.Box(-1, 1, ())
    assert (
        scalar.contains(to_host_action(scalar, np.float32(0.75))) and to_host_action(scalar, np.float32(0.75)) == 0.75
    )
    tenth = spaces.Box(-0.1, 0.1, (2,), np.float64)
    # 0.1 in float32 is above 0.1: it is the bound, and what is really outside is not hidden.
    assert tenth.contains(to_host_action(tenth, np.array([0.1, -0.1], np.float32)))
    assert to_host_action(tenth, np.array([0.2, 0.0], np.float32))[0] == pytest.approx(0.2)


def test_bounds_are_of_each_element():
    low, high = [[-1, -1], [-9, -9]], [[1, 1], [9, 9]]
    box = Box(low=normalize_bounds(low, (2, 2)), high=normalize_bounds(high, (2, 2)), shape=(2, 2))
    assert hash(box) == hash(Box(low=normalize_bounds(low, (2, 2)), high=normalize_bounds(high, (2, 2)), shape=(2, 2)))
    np.testing.assert_array_equal(box.upper, high)
    assert not box.contains(jnp.full((2, 2), 9.0)) and box.contains(jnp.asarray(high, jnp.float32))
    assert normalize_bounds([[3, 3], [3, 3]], (2, 2)) == 3.0 and normalize_bounds([-2.0], ()) == -2.0
    drawn = jax.vmap(box.sample)(jax.random.split(jax.random.key(0), 64))
    assert jax.vmap(box.contains)(drawn).all() and jnp.abs(drawn[:, 1]).max() > 1
    np.testing.assert_array_equal(box.clip(jnp.full((3, 2, 2), 20.0)), np.broadcast_to(high, (3, 2, 2)))
    with pytest.raises(RecipeError, match=r"Box.low has 2 bounds for the shape \(2, 2\)"):
        Box(low=(1.0, 2.0), high=9.0, shape=(2, 2))
    with pytest.raises(RecipeError, match=r"Box.low has 2 bounds"):
        Box(low=((1.0,), (2.0, 3.0)), high=9.0, shape=(2, 2))


@pytest.fixture
def stepped(monkeypatch):
    """Takes 3 steps of two environments of `odd_gymnasium.py`: the space of actions, and what the steps yield."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def take(name, action):
        environment = Gymnasium(name=f"odd_gymnasium:Odd{name}-v0", processes=1)
        try:
            batch, index = EnvironmentBatch(environment), jnp.arange(2)

            def step(ongoing, key):
                after = batch.step(ongoing, action, key, index)
                return after.environment_state, after

            begun = jax.jit(batch.reset)(jax.random.key(0), index)
            _, after = jax.jit(lambda ongoing: jax.lax.scan(step, ongoing, jax.random.split(jax.random.key(1), 3)))(
                begun
            )
            return environment.action_space, jax.device_get(after)
        finally:
            environment.close()

    return take


def test_a_scalar_action_arrives_as_it_is(stepped):
    _, after = stepped("ScalarBox", jnp.array([0.75, -0.5], jnp.float32))
    np.testing.assert_array_equal(after.reward, [[0.75, -0.5]] * 3)


def test_what_an_episode_led_to_is_no_array_that_its_reset_writes_again(stepped):
    _, after = stepped("SameBuffer", jnp.zeros(2, jnp.int32))
    np.testing.assert_array_equal(after.final_observation[:, 0], [[1, 1], [2, 1], [3, 1]])


def test_bounds_of_rows_come_from_the_space(stepped):
    space, _ = stepped("Bounds", jnp.zeros((2, 2, 2), jnp.float32))
    np.testing.assert_array_equal(space.upper, [[1, 1], [9, 9]])


def test_whole_numbers_and_arrays_of_one_are_cast(stepped):
    _, after = stepped("WholeNumbers", jnp.zeros(2, jnp.int32))
    assert after.final_observation.dtype == np.float32 and (after.reward == 2).all()
    np.testing.assert_array_equal(after.truncated[:, 0], [False, False, True])


@pytest.mark.parametrize(
    ("name", "words"),
    [("OldReset", "reset returned a ndarray"), ("TwoRewards", r"a reward that is float64 of shape \(2,\)")],
    ids=["OldReset", "TwoRewards"],
)
def test_what_can_not_be_cast_is_refused_by_name_before_a_step(stepped, name, words):
    with pytest.raises(RecipeError, match=rf"odd_gymnasium:Odd{name}-v0.*raised TypeError: .*{words}"):
        stepped(name, jnp.zeros(2, jnp.int32))


def test_the_processes_import_no_jax():
    code = "import panax.environments.host_worker, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
